"""Observations and rewards are normalised by statistics of all frames that were delivered."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.loopback_pool import backend_of, loopback_collector, workers_of
from helpers.replay_buffers import Buffer, KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Independent, Normal

import distcollect as dc
from distcollect.policy.normalize import Normalizer, Statistics

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GAMMA = 0.9
ENV = "Pendulum-v1"


class Seeing(nn.Module):
    """Draws a torque, and writes the observation that it saw into the frame as ``"seen"``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation: torch.Tensor) -> Any:
        chosen = self.distribution(observation)
        action = chosen.sample()
        return action, {"seen": observation, "log_prob": chosen.log_prob(action)}

    def distribution(self, observation: torch.Tensor) -> Independent:
        return Independent(Normal(self.net(observation), 1.0), 1)


class Mixed(gym.Env[Any, Any]):
    """Observations of three kinds; episodes have 5 frames."""

    observation_space = spaces.Dict(
        {
            "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
            "robot": spaces.Dict({"arm": spaces.Box(-np.inf, np.inf, (2,), np.float64)}),
            "goal": spaces.Discrete(4),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {"time": 0.0}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observation(), 1.0, self._step == 5, False, {"time": float(self._step)}

    def _observation(self) -> Any:
        arm = 1e6 + self.np_random.standard_normal(2)
        pixels = self.np_random.integers(0, 255, (2, 2), np.uint8)
        return {"pixels": pixels, "robot": {"arm": arm}, "goal": self._step % 4}


IN_PROCESS = partial(dc.SyncDataCollector, frames_per_batch=60)
SYNC = partial(loopback_collector, frames_per_batch=120, num_workers=2, sync=True)
ASYNC = partial(loopback_collector, frames_per_batch=60, num_workers=2)


def collector(make: Any, *args: Any, record: str | None = None, **given: Any) -> Any:
    settings = dc.Normalize(gamma=GAMMA, record=record)
    defaults = {"envs_per_worker": 2, "max_frames_per_traj": 47, "normalize": settings}
    made = make(*args, **{**defaults, **given})
    made.set_seed(0)
    return made


class Reference:
    """All frames so far, and their statistics as numpy computes them."""

    def __init__(self) -> None:
        self._observations: list[torch.Tensor] = []
        self._returns: list[float] = []
        self._so_far: dict[int, float] = defaultdict(float)

    def add(self, batch: TensorDict) -> None:
        ids = batch["collector", "traj_ids"]
        self._observations.append(batch["observation"][ids >= 0].double())
        ids = ids.flatten().tolist()
        for traj_id, reward in zip(ids, batch["next", "reward"].flatten().tolist(), strict=True):
            if traj_id < 0:
                continue
            self._so_far[traj_id] = GAMMA * self._so_far[traj_id] + reward
            self._returns.append(self._so_far[traj_id])

    def observations(self, value: torch.Tensor) -> torch.Tensor:
        every = torch.cat(self._observations)
        deviation = (every.var(0, correction=0) + 1e-8).sqrt()
        return ((value.double() - every.mean(0)) / deviation).clamp(-10, 10)

    def rewards(self, value: torch.Tensor) -> torch.Tensor:
        return (value.double() / np.sqrt(np.var(self._returns) + 1e-8)).clamp(-10, 10)


class SecondIsSlow(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, context: dc.EnvContext, pause_s: float = 0.005) -> None:
        super().__init__(gym.make(ENV))
        self._pause_s = pause_s * context.worker_id

    def step(self, action: Any) -> Any:
        time.sleep(self._pause_s)
        return super().step(action)


PREEMPTING = partial(SYNC, preemptive_threshold=0.5)


def without_rows(*args: Any, **given: Any) -> Any:
    """The frames of both workers lie along one dimension."""
    given |= {"kind": dc.MultiSyncDataCollector, "envs_per_worker": 1, "cat_results": 0}
    return loopback_collector(*args, frames_per_batch=120, num_workers=2, **given)


@pytest.mark.parametrize("make", [IN_PROCESS, SYNC, ASYNC, PREEMPTING, without_rows])
def test_the_statistics_are_those_of_all_delivered_frames(make: Any) -> None:
    """Not those of frames that were given up."""
    reference, policy = Reference(), Seeing()
    refusals = itertools.cycle([False, True, True])

    def postproc(batch: TensorDict) -> TensorDict:
        if next(refusals):
            raise ValueError("not this one")
        return batch

    with collector(make, SecondIsSlow, policy, record="raw", postproc=postproc) as tested:
        for index in range(4):
            for _ in range(2 * (index > 0)):
                with pytest.raises(ValueError, match="not this one"):
                    tested.next()
            batch = tested.next()
            assert (make is PREEMPTING) == (batch["collector", "traj_ids"] < 0).any()
            reference.add(batch)
            tested.update_policy_weights_(policy)
            new = tested.normalize(batch)
            for key in ("observation", ("next", "observation")):
                expected = reference.observations(batch[key])
                torch.testing.assert_close(new[key].double(), expected, rtol=0, atol=1e-6)
            expected = reference.rewards(batch["next", "reward"])
            torch.testing.assert_close(new["next", "reward"].double(), expected, rtol=0, atol=1e-6)
            assert new["seen"] is batch["seen"]


def test_returns_go_on_where_a_rollout_has_no_frame_of_an_env() -> None:
    """As a native vector env's, that was preempted."""
    reference = Reference()
    with collector(IN_PROCESS, ENV, Seeing(), record="raw", max_frames_per_traj=None) as made:
        statistics = Statistics(
            Normalizer(made.normalizer.settings), backend_of(made).layout, raw=True
        )
        batches = [made.next() for _ in range(4)]
    batches[1]["collector", "traj_ids"][1] = -1
    for batch in batches:
        header: Any = SimpleNamespace(worker_id=0, policy_version=(0, 0), num_steps=30)
        statistics.take(batch, [header])
        reference.add(batch)
    reward = batches[-1]["next", "reward"]
    new = statistics.normalized(batches[-1])["next", "reward"].double()
    torch.testing.assert_close(new, reference.rewards(reward), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (IN_PROCESS, {}),
        (SYNC, {"weight_sync": dc.WeightSync(wire_dtype="bfloat16", changes_only=True)}),
        (SYNC, {"update_at_each_batch": True, "preemptive_threshold": 0.0}),
        (ASYNC, {"staleness": dc.Staleness(3)}),
        (ASYNC, {"init_random_frames": 100, "compact_obs": True}),
    ],
)
def test_a_batch_has_what_the_policy_saw(make: Any, given: Any) -> None:
    policy = Seeing()
    with collector(make, ENV, policy, **given) as tested:
        for _ in range(6):
            batch = tested.next()
            is_real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
            is_real = is_real & (batch["log_prob"] != 0)  # no random action
            assert torch.equal(batch["observation"][is_real], batch["seen"][is_real])
            log_prob = policy.distribution(batch["observation"]).log_prob(batch["action"])
            if "weight_sync" not in given and not batch["collector", "policy_version"].any():
                torch.testing.assert_close(log_prob[is_real], batch["log_prob"][is_real])
            tested.update_policy_weights_(policy)
        assert batch["seen"][is_real].abs().max() <= 10  # the clip
        if "compact_obs" not in given:
            ids = batch["collector", "traj_ids"]
            goes_on = is_real[..., 1:] & (ids[..., 1:] == ids[..., :-1])
            versions = batch["collector", "policy_version"]
            goes_on &= versions[..., 1:] == versions[..., :-1]
            after = batch["next", "observation"][..., :-1, :][goes_on]
            assert torch.equal(after, batch["observation"][..., 1:, :][goes_on])


@pytest.mark.parametrize("make", [IN_PROCESS, SYNC])
def test_evaluation_and_deployment_use_what_was_published_last(make: Any) -> None:
    policy = Seeing()
    with collector(make, ENV, policy) as tested:
        for _ in range(2):
            tested.next()
            tested.update_policy_weights_(policy)
        before = tested.state_dict()
        deployed = nn.Sequential(copy.deepcopy(tested.normalizer), policy)
        returns = tested.evaluate(3, seed=1).returns
        assert tested.state_dict() == before
    with collector(make, ENV, deployed, normalize=None) as plain:
        assert torch.equal(plain.evaluate(3, seed=1).returns, returns)
        assert plain.normalizer is None


class Far(gym.Env[Any, Any]):
    """The arm is far from 0; only where the policy is evaluated, it is scored, or has no arm."""

    action_space = spaces.Discrete(2)

    def __init__(self, context: dc.EnvContext, *, lacks: bool = False) -> None:
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        more = {"score": box} if context.for_evaluation else {}
        entries = more if lacks and more else {"arm": box, **more}
        self.observation_space = spaces.Dict(entries)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {key: np.full(1, 1e3, np.float32) for key in self.observation_space}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], float(action), True, False, {}


@pytest.mark.parametrize("make", [IN_PROCESS, SYNC])
def test_an_env_may_show_more_where_the_policy_is_evaluated(make: Any) -> None:
    def is_near(arm: torch.Tensor) -> torch.Tensor:
        return (arm[:, 0] < 100).long()

    for maker, returns in ((Far, 1.0), (partial(Far, lacks=True), None)):
        with collector(make, maker, is_near) as tested:
            for _ in range(2):
                tested.next()
                tested.update_policy_weights_()
                if returns:
                    assert tested.evaluate(2).returns.tolist() == [returns] * 2
                    continue
                with pytest.raises(dc.ArgumentError, match=r"shows no arm \[1\] float32, which"):
                    tested.evaluate(2)
            assert tested.next()["action"].all()


def test_what_a_worker_left_behind_is_normalised_as_it_acted() -> None:
    policy, seen, maker = Seeing(), set(), partial(SecondIsSlow, pause_s=0.05)
    with collector(ASYNC, maker, policy, frames_per_batch=20) as tested:
        pool, workers = backend_of(tested).pool, workers_of(tested)
        workers.drained = partial(pool.lose, replaced=False)
        for _ in range(6):
            tested.next()
            tested.update_policy_weights_(policy)
        eventually(lambda: 1 in pool.num_ready)  # newer ones of the other worker wait before it
        pool.leave(1, 0)
        eventually(lambda: pool.worker_ids == (0,))
        while 1 not in seen:
            batch = tested.next()
            seen.update(batch["collector", "worker_id"].unique().tolist())
            assert torch.equal(batch["observation"], batch["seen"])


@pytest.mark.parametrize(("before", "after"), [(IN_PROCESS, SYNC), (SYNC, IN_PROCESS)])
def test_a_checkpoint_goes_on_with_the_same_statistics(
    tmp_path: Path, before: Any, after: Any
) -> None:
    policy, path = Seeing(), tmp_path / "checkpoint.pt"
    reference = Reference()
    with collector(before, ENV, policy, record="raw") as first:
        checkpoint = dc.Checkpoint(path, policy=policy, collector=first)
        for _ in range(2):
            reference.add(first.next())
            checkpoint.save()
            saved = json.loads(json.dumps(first.state_dict()["normalizer"]))
            first.update_policy_weights_(policy)
        published = copy.deepcopy(first.normalizer)
    with collector(after, ENV, policy, record="raw") as second:
        assert dc.Checkpoint(path, policy=policy, collector=second).load()
        assert second.state_dict()["normalizer"] == saved
        example = torch.randn(5, 3)
        assert torch.equal(second.normalizer(example), published(example))
        batch = second.next()
        assert torch.equal(batch["seen"], published(batch["observation"]))
        reference.add(batch)
        second.update_policy_weights_(policy)
        expected = reference.observations(example).float()
        torch.testing.assert_close(second.normalizer(example), expected, rtol=0, atol=1e-6)
    with collector(IN_PROCESS, ENV, policy) as trained_in_place:
        for _ in range(2):
            trained_in_place.next()
        state = trained_in_place.state_dict()
        trained_in_place.next()  # it acts with the statistics of the first two
        published = copy.deepcopy(trained_in_place.normalizer)
    with collector(after, ENV, policy) as third:
        third.load_state_dict(state)
        assert torch.equal(third.normalizer(example), published(example))
    other = dc.Normalize(observations=False)
    for settings, error in ((None, "with the normalize="), (other, r"normalises \[\]")):
        with (
            collector(after, ENV, policy, normalize=settings) as third,
            pytest.raises(dc.ArgumentError, match=error),
        ):
            dc.Checkpoint(path, policy=policy, collector=third).load()


def test_a_batch_that_the_buffer_refused_takes_no_statistics_that_were_loaded() -> None:
    class Refusing:
        def extend(self, data: TensorDict) -> None:
            raise RuntimeError("full")

    with collector(IN_PROCESS, ENV, Seeing()) as first:
        first.next()
        state = first.state_dict()
    with collector(IN_PROCESS, ENV, Seeing(), replay_buffer=Refusing()) as second:
        with pytest.raises(RuntimeError, match="full"):
            second.next()
        second.load_state_dict(state)
        assert second.state_dict()["normalizer"] == state["normalizer"]


@pytest.mark.parametrize(
    ("observations", "changed"),
    [
        (True, {("robot", "arm")}),
        ([("robot", "arm"), "pixels"], {("robot", "arm"), ("pixels",)}),
        (["goal", ("goal",)], {("goal",)}),
        (False, set()),
    ],
)
@pytest.mark.parametrize("as_tensordict", [False, True])
def test_which_entries_are_normalised(
    observations: Any, changed: set[Any], as_tensordict: bool
) -> None:
    seen: dict[Any, torch.Tensor] = {}
    keys: list[Any] = ["pixels", ("robot", "arm"), "goal", "time"]

    def act(*entries: torch.Tensor) -> torch.Tensor:
        seen.update(zip(keys, (each.clone() for each in entries), strict=True))
        return torch.zeros(len(entries[0]), dtype=torch.int64)

    def plain(pixels: Any, robot: Any, goal: Any, time: Any) -> torch.Tensor:
        return act(pixels, robot["arm"], goal, time)

    policy = TensorDictModule(act, in_keys=keys, out_keys=["action"]) if as_tensordict else plain
    settings = dc.Normalize(observations=observations)
    given = {"info_keys": ["time"], "normalize": settings, "frames_per_batch": 20}
    with collector(IN_PROCESS, Mixed, policy, **given) as tested:
        for _ in range(2):
            batch = tested.next()
        zeros = tested.fake_tensordict()
        for key in keys:
            name = key if isinstance(key, tuple) else (key,)
            assert torch.equal(batch[name][:, -1], seen[key])
            assert zeros[name].dtype == batch[name].dtype
            assert (batch[name].double().abs().max() < 4) == (name in changed or key == "goal")
        assert batch["pixels"].dtype == (torch.float32 if ("pixels",) in changed else torch.uint8)
        assert (batch["next", "reward"] != 1).all()
        observation = {"pixels": torch.zeros(2, 2), "robot": {"arm": torch.full((2,), 1e6)}}
        new = tested.normalizer(observation)
        assert (new["robot"]["arm"] is observation["robot"]["arm"]) == (
            ("robot", "arm") not in changed
        )


@pytest.mark.parametrize("make", [IN_PROCESS, SYNC])
@pytest.mark.parametrize("has_models", [False, True])
def test_statistics_come_with_whatever_weights_are_given(make: Any, has_models: bool) -> None:
    policy, other, model = Seeing(), Seeing(), nn.Linear(1, 1)
    sources: list[Any] = [None, policy, other, other.state_dict(), TensorDict.from_module(other)]
    given: dict[str, Any] = {}
    if has_models:
        given["models"] = {"model": model}
        sources = [None, policy, *({"policy": each, "model": model} for each in sources[2:])]
    elif make is SYNC:
        given["weight_sync"] = dc.WeightSync(exclude=["*.bias"])
    with collector(make, ENV, policy, record="raw", **given) as tested:
        for source in sources:
            tested.next()
            tested.update_policy_weights_(source)
            now = copy.deepcopy(tested.normalizer)
            batch = tested.next()
            assert torch.equal(batch["seen"], now(batch["observation"]))


@pytest.mark.parametrize("policy", [None, lambda observation: torch.ones(len(observation), 1)])
def test_a_policy_without_weights_has_statistics(policy: Any) -> None:
    with collector(SYNC, ENV, policy) as tested:
        tested.next()
        tested.update_policy_weights_()
        batch = tested.next()
        assert batch["collector", "policy_version"].min() == 1
        assert 0.5 < batch["observation"].std() < 2


class Meeting(Seeing):
    """Calls a function in the middle of its publication."""

    meet: Any = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.meet is not None:
            self.meet()
        return super().state_dict(*args, **kwargs)


def test_rollouts_may_end_while_weights_are_published() -> None:
    buffer, policy = KeepingBuffer(), Meeting()

    def three_more() -> None:
        wanted = len(buffer.added) + 3
        eventually(lambda: len(buffer.added) >= wanted)

    with collector(IN_PROCESS, ENV, policy, record="normalized", replay_buffer=buffer) as tested:
        tested.start()
        policy.meet = three_more
        tested.update_policy_weights_(policy)
        policy.meet = None
        three_more()
        for batch in buffer.added:
            assert torch.equal(batch["observation"], batch["seen"])
        tested.async_shutdown(10)


def test_a_replay_buffer_has_raw_frames() -> None:
    buffer = Buffer()
    with collector(IN_PROCESS, ENV, Seeing(), replay_buffer=buffer) as tested:
        for _ in range(3):
            tested.next()
            tested.update_policy_weights_()
        sample = buffer.sample(32)
        new = tested.normalize(sample)
        assert sample["observation"][:, :2].norm(dim=-1).sub(1).abs().max() < 1e-6
        assert torch.equal(new["observation"], tested.normalize(sample["observation"]))
        tested.start()
        while len(buffer) < 400:
            tested.update_policy_weights_()
        tested.async_shutdown(10)
    with (
        pytest.raises(dc.ArgumentError, match="pass normalize="),
        collector(IN_PROCESS, ENV, Seeing(), normalize=None) as plain,
    ):
        plain.normalize(sample)
