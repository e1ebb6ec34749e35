"""Seeding a collector in async mode: what it costs, and what an exception in it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.judge_seeds import RandomEnv, RandomPolicy, differing
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from torch import nn

import distcollect as dc
from distcollect.common.peer_ids import Identity
from distcollect.common.seeding import ENVS_PER_TRAINER, process_seeds

STEPS = 50
SOON_S = 60


class Gated(gym.Env[np.ndarray, int]):
    """Each step needs a permit; the observation is the seed of the last reset that had one."""

    observation_space = gym.spaces.Box(0, 2**31, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    permits = threading.Semaphore(0)
    num_steps = 0
    seed = 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.seed = float(seed)
        return np.array([self.seed]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.permits.acquire(timeout=SOON_S)
        Gated.num_steps += 1
        return np.array([self.seed]), 0.0, False, False, {}


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[dc.RPCDataCollector]:
    Gated.permits, Gated.num_steps = threading.Semaphore(0), 0
    with loopback_collector(Gated, None, frames_per_batch=STEPS, num_workers=1, **options) as made:
        try:
            yield made
        finally:
            Gated.permits.release(100 * STEPS)  # it may be in a step


def one_batch_then_in_a_step(collector: dc.RPCDataCollector) -> None:
    """Take a batch; the worker is in a step of the next rollout then, which doesn't end."""
    Gated.permits.release(STEPS + 3)
    collector.next(SOON_S)
    eventually(lambda: Gated.num_steps == STEPS + 3)


def first_observation(collector: dc.RPCDataCollector) -> float:
    Gated.permits.release(STEPS)
    batch = collector.next(SOON_S)
    return float(batch["observation"].flatten()[0])


def seeded_with(seed: int) -> float:
    """What a collector observes that was seeded before its first batch."""
    with opened(total_frames=STEPS) as collector:
        collector.set_seed(seed)
        return first_observation(collector)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_seed_before_the_first_batch_costs_no_frames(resumes: bool) -> None:
    """Nor does a resumed run lose any."""
    with opened(total_frames=3 * STEPS) as collector:
        Gated.permits.release(10 * STEPS)  # workers that may collect now would
        if resumes:
            state = collector.state_dict()
            collector.load_state_dict({**state, "seed": (3, False)})
        else:
            collector.set_seed(3)
        assert len([collector.next(SOON_S) for _ in range(3)]) == 3
        total = collector.ledger.total
        assert (total.stepped, total.delivered, total.lost) == (3 * STEPS, 3 * STEPS, {})


def test_a_seed_waits_for_a_step_and_not_for_a_rollout() -> None:
    expected = seeded_with(5)
    with opened() as collector:
        one_batch_then_in_a_step(collector)
        setting = threading.Thread(target=collector.set_seed, args=(5,), daemon=True)
        setting.start()
        while setting.is_alive():
            Gated.permits.release()
            setting.join(0.5)
        given_up = Gated.num_steps - STEPS
        assert given_up < STEPS, "it waits for the rest of the rollout"
        assert first_observation(collector) == expected
        assert collector.ledger.total.lost == {"given_up": given_up}


def test_an_interrupted_wait_for_the_seed_leaves_the_workers_seeded() -> None:
    expected = seeded_with(7)
    with opened() as collector:
        one_batch_then_in_a_step(collector)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            collector.set_seed(7)
        Gated.permits.release()
        assert first_observation(collector) == expected
        assert collector.state_dict()["seed"] == (7, False)


def test_an_evaluation_leaves_the_global_generators_as_they_were() -> None:
    runs = []
    for evaluates in (False, True):
        with dc.SyncDataCollector(RandomEnv, RandomPolicy(), frames_per_batch=12) as collector:
            collector.set_seed(7)
            collector.next()
            if evaluates:
                collector.evaluate(3, seed=1)
            runs.append([collector.next()])
    assert differing(*runs) == []


class Drawing(nn.Module):
    """Returns what it draws, with weights that a copy for the background can have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        drawn = torch.rand(len(observation), dtype=torch.float64)
        return (drawn < 0.5).long(), {"drawn": drawn}


def test_another_collector_does_not_make_the_background_draw_its_numbers_again() -> None:
    buffer = KeepingBuffer()
    options: dict[str, Any] = {"frames_per_batch": 100, "total_frames": 3000}
    with (
        dc.SyncDataCollector("CartPole-v1", Drawing(), replay_buffer=buffer, **options) as drawing,
        dc.SyncDataCollector("CartPole-v1", Drawing(), **options) as other,
    ):
        drawing.start()
        while drawing.is_running:
            other.evaluate(1, seed=3)
    drawn = torch.cat([frames["drawn"] for frames in buffer.added])
    assert len(drawn.unique()) == len(drawn) == 3000


class SeededOnce(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the first reset a seed of its own, as the page says."""

    def __init__(self, context: dc.EnvContext) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.seed: int | None = 5 + context.env_index

    def reset(self, **_kwargs: Any) -> Any:
        seed, self.seed = self.seed, None
        return self.env.reset(seed=seed)


@pytest.mark.parametrize("has_workers", [False, True])
def test_each_trainer_has_episodes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, has_workers: bool
) -> None:
    def first_batch(trainer: int) -> torch.Tensor:
        own = Identity("run", trainer, num_trainers=2)
        monkeypatch.setattr("distcollect.common.peer_ids._identity", own)
        kind: Any = loopback_collector if has_workers else dc.SyncDataCollector
        options: dict[str, Any] = {"num_workers": 1} if has_workers else {}
        with kind(RandomEnv, RandomPolicy(), frames_per_batch=STEPS, **options) as collector:
            collector.set_seed(7)
            return collector.next(SOON_S)["env_own"].clone()

    first, second = first_batch(0), first_batch(1)
    assert torch.equal(first, first_batch(0))
    assert not torch.equal(first, second)


def test_a_second_trainer_does_not_walk_torchrls_chain_to_its_envs() -> None:
    """They are counted from some millions on; it takes microseconds for each of them."""
    first = ENVS_PER_TRAINER
    seeds = process_seeds(3, range(first, first + 2), 0, static=False, as_torchrl=True)
    assert seeds == process_seeds(3, range(first, first + 2), 0, static=False)


def test_a_port_from_gymnasiums_vector_env_keeps_its_trajectories() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return torch.randint(2, observation.shape[:1])

    with dc.SyncDataCollector(
        SeededOnce, policy, frames_per_batch=600, envs_per_worker=3
    ) as collector:
        torch.manual_seed(5)
        batch = collector.next()
    assert batch["next", "done"].sum() > 3
    mode = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode)
    observation, _ = envs.reset(seed=5)
    torch.manual_seed(5)
    for t in range(200):
        assert np.array_equal(observation, batch["observation"][:, t])
        observation, *_ = envs.step(policy(torch.from_numpy(observation)).numpy())
    envs.close()


@pytest.mark.parametrize("num_before", [1, 2])
def test_a_seed_gives_the_same_batches_however_many_were_taken_before(num_before: int) -> None:
    """With reproducible=True; workers deliver in turn."""
    with loopback_collector(
        "CartPole-v1", None, frames_per_batch=STEPS, num_workers=2, reproducible=True
    ) as collector:
        for _ in range(num_before):
            collector.next()
        runs = []
        for _ in range(2):
            collector.set_seed(7)
            runs.append([collector.next().clone() for _ in range(3)])
    assert [int(batch["collector", "worker_id"][0, 0]) for batch in runs[0]] == [0, 1, 0]
    assert differing(*runs) == []
