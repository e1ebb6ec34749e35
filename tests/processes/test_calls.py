"""Calling the envs' methods, and evaluating the policy, while collecting."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.loopback_pool import loopback_collector
from torch import nn
from torch.distributions import Categorical

import distcollect as dc

T = 10


class Levels(gym.Env):
    """Shows its level; an episode is as long as the level, and every frame is worth it."""

    observation_space = gym.spaces.Box(-1, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, context: dc.EnvContext) -> None:
        self.name = f"{context.worker_id}.{context.env_index}"
        self._level, self._frame = 5, 0

    def _seen(self) -> np.ndarray:
        return np.array([self._level], np.float32)

    def set_level(self, level: int, *, plus: int = 0) -> str:
        if level < 0:
            raise ValueError(f"no level {level}")
        self._level = level + plus
        return f"{self.name} at {self._level}"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._frame = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._frame += 1
        return self._seen(), float(action), self._frame >= self._level, False, {}


class Slow(Levels):
    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class Acts(nn.Module):
    """The action is its weight, mostly."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation: torch.Tensor) -> Categorical:
        probs = 0.9 * nn.functional.one_hot(self.action.long(), 3) + 0.1 / 3
        return Categorical(probs.expand(len(observation), -1))


def sync(*args: Any, **settings: Any) -> Any:
    return dc.SyncDataCollector(*args, frames_per_batch=2 * T, envs_per_worker=2, **settings)


def pooled(*args: Any, **settings: Any) -> Any:
    sizes = {"frames_per_batch": 2 * T, "envs_per_worker": 2, "num_workers": 2}
    return loopback_collector(*args, **{**sizes, **settings})


class TestCall:
    def test_every_env(self) -> None:
        with pooled(Levels) as collector:
            assert collector.call("set_level", 3) == {
                0: ["0.0 at 3", "0.1 at 3"],
                1: ["1.0 at 3", "1.1 at 3"],
            }
            assert collector.call("set_level", 3, plus=1, worker_ids=1) == {
                1: ["1.0 at 4", "1.1 at 4"]
            }
            assert collector.call("name", worker_ids=[0]) == {0: ["0.0", "0.1"]}

    def test_in_this_process(self) -> None:
        with sync(Levels) as collector:
            assert collector.call("set_level", 7) == {0: ["0.0 at 7", "0.1 at 7"]}
            assert (collector.next()["next", "observation"][:, 0] == 7).all()

    def test_a_vector_env(self) -> None:
        def make() -> Any:
            context = dc.EnvContext(worker_id=0, env_index=0, incarnation=0, seed=None)
            return gym.vector.SyncVectorEnv([lambda: Levels(context)] * 2)

        with dc.SyncDataCollector(make, frames_per_batch=2 * T) as collector:
            assert collector.call("set_level", 3) == {0: ["0.0 at 3"] * 2}

    def test_in_the_middle_of_a_rollout(self) -> None:
        """A rollout takes 4 s; the answer doesn't wait for its end, nor end it."""
        with dc.RPCDataCollector(Slow, frames_per_batch=200, num_workers=1) as collector:
            begin = time.monotonic()
            assert collector.call("set_level", 3) == {0: ["0.0 at 3"]}
            assert time.monotonic() - begin < 2
            levels = collector.next()["next", "observation"].squeeze()
            assert levels[-1] == 3
            assert levels.shape == (200,)

    @pytest.mark.parametrize(
        ("method", "arguments", "error", "message"),
        [
            ("set_leevl", [1], dc.EnvError, "set_leevl"),
            ("set_level", [-1], dc.EnvError, "no level -1"),
        ],
    )
    @pytest.mark.parametrize("make", [sync, pooled])
    def test_what_fails_goes_on(
        self, make: Any, method: str, arguments: Any, error: Any, message: str
    ) -> None:
        with make(Levels) as collector:
            with pytest.raises(error, match=message):
                collector.call(method, *arguments)
            assert collector.next().shape == (2, T)

    def test_unknown_worker(self) -> None:
        with pooled(Levels) as collector, pytest.raises(ValueError, match=r"no worker \[7\]"):
            collector.call("name", worker_ids=7)


class TestEvaluate:
    @pytest.mark.parametrize("make", [sync, pooled])
    def test_whole_episodes(self, make: Any) -> None:
        with make(Levels, Acts(2)) as collector:
            found = collector.evaluate(7)
            assert found.returns.tolist() == [10.0] * 7  # five frames worth 2 each
            assert found.lengths.tolist() == [5] * 7
            assert found.policy_version.tolist() == [0] * 7
            assert found.mean_return == 10
            collector.update_policy_weights_(Acts(1))
            found = collector.evaluate(1)
            assert (found.returns.item(), found.policy_version.item()) == (5.0, 1)

    # In processes: the threads of the loopback share torch's random numbers.
    @pytest.mark.parametrize("kind", [dc.SyncDataCollector, dc.MultiSyncDataCollector])
    def test_random_numbers(self, kind: Any) -> None:
        """With a seed the same episodes; collection goes on as if nothing had happened."""

        def collect(*, evaluates: bool) -> Any:
            how = {} if kind is dc.SyncDataCollector else {"num_workers": 2}
            with kind(
                "CartPole-v1", Chance(), frames_per_batch=4 * T, envs_per_worker=2, **how
            ) as collector:
                collector.set_seed(5)
                batches = []
                for _ in range(4):
                    batches.append(collector.next())
                    if evaluates:
                        found = collector.evaluate(8, deterministic=False, seed=3).returns
                        assert len(found.unique()) > 1
                        same = collector.evaluate(8, deterministic=False, seed=3).returns
                        assert torch.equal(found.sort()[0], same.sort()[0])
                return torch.stack(batches).exclude("collector")

        assert (collect(evaluates=True) == collect(evaluates=False)).all()

    @pytest.mark.parametrize("length", [30, 100])
    @pytest.mark.parametrize("kind", ["plain", "filler steps", "fails once"])
    def test_an_episode_is_whole_whatever_the_envs_do(self, kind: str, length: int) -> None:
        made: list[int] = []

        def one(length: int = length) -> gym.Env:
            made.append(1)
            fails_at = 77 if kind == "fails once" and len(made) == 2 else -1
            return Long(length, fails_at)

        def vector() -> Any:
            makers = [one, lambda: one(3)]
            return gym.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)

        with dc.SyncDataCollector(
            NativeNextStep.of(vector) if kind == "filler steps" else one,
            frames_per_batch=2 * T,
            envs_per_worker=1 if kind == "filler steps" else 2,
            reset_at_each_iter=kind == "plain",
        ) as collector:
            found = collector.evaluate(8)
        assert set(found.lengths.tolist()) == ({length, 3} if kind == "filler steps" else {length})
        assert torch.equal(found.returns, found.lengths.double())

    def test_envs_themselves_will_not_do(self) -> None:
        env = gym.make("CartPole-v1")
        with (
            dc.SyncDataCollector(env, frames_per_batch=T) as collector,
            pytest.raises(ValueError, match="a callable that makes one"),
        ):
            collector.evaluate(1)

    def test_deadline(self) -> None:
        with (
            pooled(Endless) as collector,
            pytest.raises(dc.DeadlineError, match="not over, the longest after"),
        ):
            collector.evaluate(1, timeout_s=0.2)


class Long(gym.Env):
    """Each frame is worth 1."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length: int, fails_at: int) -> None:
        self._length, self._fails_at, self._total, self._frame = length, fails_at, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._frame = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._frame += 1
        self._total += 1
        if self._total == self._fails_at:
            raise OSError("out of paper")
        return np.zeros(1, np.float32), 1.0, self._frame == self._length, False, {}


class NativeNextStep(gym.vector.VectorWrapper):
    """Shows its vector env as a native one, whose rows can't be reset one by one."""

    @classmethod
    def of(cls, make: Any) -> Any:
        return lambda: cls(make())

    @property
    def unwrapped(self) -> Any:
        return self


class Endless(Levels):
    def step(self, action: Any) -> Any:
        return self._seen(), 0.0, False, False, {}


class Chance(nn.Module):
    def forward(self, observation: torch.Tensor) -> Categorical:
        return Categorical(torch.full((len(observation), 2), 0.5))


class TestEvaluationWorkers:
    def test_each_version_in_the_background(self) -> None:
        evaluation = dc.EvaluationWorkers(num_episodes=2)
        with dc.RPCDataCollector(
            Levels,
            Acts(0),
            frames_per_batch=T,
            num_workers=2,
            evaluation=evaluation,
        ) as collector:
            for version in range(1, 4):
                collector.update_policy_weights_(Acts(version % 3))
                batch = collector.next()
                assert (batch["collector", "worker_id"] == 0).all()
                deadline = time.monotonic() + 30
                while not any(e.policy_version[0] == version for e in collector.evaluations):
                    assert time.monotonic() < deadline
                    collector.next()
        for found in collector.evaluations:
            [version] = set(found.policy_version.tolist())
            assert found.returns.tolist() == [5.0 * (version % 3)] * 2
        versions = [int(found.policy_version[0]) for found in collector.evaluations]
        assert versions == sorted(set(versions))

    def test_sync_batches_are_shared_by_the_others(self) -> None:
        with loopback_collector(
            Levels,
            sync=True,
            frames_per_batch=2 * T,
            num_workers=3,
            evaluation=dc.EvaluationWorkers(),
        ) as collector:
            assert collector.next()["collector", "worker_id"][:, 0].tolist() == [0, 1]

    def test_somebody_has_to_collect(self) -> None:
        with pytest.raises(ValueError, match="at least one has to collect"):
            dc.RPCDataCollector(
                Levels, frames_per_batch=T, num_workers=1, evaluation=dc.EvaluationWorkers()
            )
