"""EnvPool with a ``batch_size`` below ``num_envs``: whole trajectories, in order, exact batches."""

from __future__ import annotations

import warnings
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.uneven_pool import UnevenPool
from helpers.engines import Told, collect, offer
from helpers.recurrent_policies import Learned, check_starts
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.engine.build import build_engine
from distcollect.engine.plan import WorkerPlan

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
# Raised by Gymnasium when EnvPool makes its spaces.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")

N = 5
LONGEST = 9


def make_pool(task: str = "CartPole-v1", batch_size: int = 2, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"num_envs": N, "num_threads": 2, "seed": [3, 5, 7, 9, 11]}
    options |= {"max_episode_steps": LONGEST, "batch_size": batch_size, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make_gymnasium(task, **options)


def choose(observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """An action that follows from the observation, and an extra that says which one."""
    sums = observation.double().sum(-1)
    return (sums * 1000).floor().long() % 2, {"sum": sums}


class Remembering(nn.Module):
    """Counts the frames of each episode in its state."""

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"age": torch.zeros(num_envs)}

    def forward(self, observation: torch.Tensor, age: torch.Tensor) -> Any:
        return choose(observation)[0], {"age": age + 1, "seen": age.clone()}


class Collected:
    """An engine over such a pool, and the batches that it gives."""

    def __init__(self, env: Any, policy: Any = choose, **kwargs: Any) -> None:
        self.batches: list[TensorDict] = []
        self.engine: Any = build_engine(
            WorkerPlan(env, N, policy=policy, shares_policy=True, **kwargs), traj_ids=count()
        )

    def collect(self, steps: int, **kwargs: Any) -> TensorDict:
        batch = collect(self.engine, steps, **kwargs)
        self.batches.append(batch)
        return batch

    def collect_often(self, times: int, steps: int = 5, **kwargs: Any) -> None:
        for _ in range(times):
            self.collect(steps, **kwargs)

    def lost(self) -> int:
        """How many frames are in no batch and do not wait for the next one."""
        counter = self.engine.counter
        masks = [batch.get(("collector", "mask"), None) for batch in self.batches]
        kept = sum(
            batch.numel() if mask is None else int(mask.sum())
            for batch, mask in zip(self.batches, masks, strict=True)
        )
        lost = sum(counter.lost.values())
        assert counter.stepped == kept + lost + self.engine.num_waiting
        return int(lost)

    def rows(self) -> list[TensorDict]:
        """All real frames of each row, in the order in which they were delivered."""
        rows = []
        for row in range(N):
            parts = []
            for batch in self.batches:
                mask = batch.get(("collector", "mask"), None)
                part = batch[row].exclude(("collector", "mask"))
                parts.append(part if mask is None else part[mask[row]])
            rows.append(torch.cat(parts))
        return rows

    def check(self) -> None:
        """Trajectories are whole and in order, no other row has their id, and actions fit."""
        num_ends = 0
        seen: list[set[int]] = []
        for row in self.rows():
            ids = row["collector", "traj_ids"]
            done = row["next", "done"][:, 0]
            changes = ids[1:] != ids[:-1]
            assert changes[done[:-1]].all()
            follows = (row["next", "observation"][:-1] == row["observation"][1:]).all(-1)
            assert follows[~changes].all(), "a frame is missing within a trajectory"
            assert not follows[done[:-1]].any(), "no true final observation"
            assert torch.equal(row["action"], choose(row["observation"])[0])
            seen.append(set(ids.tolist()))
            assert len(seen[-1]) == 1 + int(changes.sum()), "an id comes twice"
            num_ends += int(done.sum())
        assert len(set.union(*seen)) == sum(map(len, seen))
        assert num_ends > N
        self.lost()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_each_frame_has_the_version_that_chose_its_action(batch_size: int, fresh: bool) -> None:
    """In sync mode no frame is older than the weights were when its batch was asked for."""
    policy = Told()
    collected = Collected(make_pool(batch_size=batch_size), policy)
    versions = count(1)

    def at_call(call: int) -> None:
        if call % 7 == 0:
            offer(collected.engine.weights, next(versions))

    policy.at_call = at_call
    for _ in range(6):
        offer(collected.engine.weights, version := next(versions))
        batch = collected.collect(12, fresh=fresh)
        got = batch["collector", "policy_version"]
        assert torch.equal(got, batch["told"].long())
        assert not fresh or got.min() >= version
        assert (got[:, 1:] >= got[:, :-1]).all()
    collected.check()


def test_preempted_rollouts() -> None:
    calls = count()

    def policy(observation: torch.Tensor) -> Any:
        if next(calls) % 11 == 10:
            collected.engine.preempt()
        return choose(observation)

    collected = Collected(make_pool(), policy)
    for _ in range(12):
        collected.collect(20)
    assert any(("collector", "mask") in batch.keys(True) for batch in collected.batches)
    collected.check()


def test_a_recurrent_policy() -> None:
    collected = Collected(make_pool(), Remembering())
    for _ in range(6):
        collected.collect(15)
    collected.check()
    for row in collected.rows():
        ids, seen = row["collector", "traj_ids"], row["seen"]
        starts = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
        # An id also changes where frames are missing; then the episode goes on.
        first = row["observation"].abs().max(-1).values <= 0.05
        assert (seen[starts & first & (seen < LONGEST)] == 0).any()
        assert torch.equal(seen[1:][~starts[1:]], seen[:-1][~starts[1:]] + 1)


def test_a_policy_that_raises_leaves_it_usable() -> None:
    """What EnvPool steps by then is not waited for in vain."""
    calls = count()

    def policy(observation: torch.Tensor) -> Any:
        if next(calls) % 60 == 59:
            raise ValueError
        return choose(observation)

    collected, num_raised = Collected(make_pool(), policy), 0
    for _ in range(20):
        try:
            collected.collect(5)
        except dc.PolicyError:
            num_raised += 1
    assert 0 < num_raised < 20
    collected.check()


def test_a_pool_that_raises_is_replaced() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(make_pool())
        return made[-1]

    collected = Collected(make, max_env_faults=1)
    collected.collect(30)
    usual = made[0]._send

    def fails(_: Any) -> None:
        made[0]._send = usual
        raise RuntimeError("no more")

    made[0]._send = fails
    batch = collected.collect(30)
    assert len(made) == 2
    assert batch["collector", "faulted"].any()
    assert batch["next", "truncated"][batch["collector", "faulted"]].all()
    collected.check()


def test_rows_that_wait_begin_from_the_weights_that_choose_their_first_frame() -> None:
    policy = Learned()
    collected = Collected(make_pool(), policy)
    for fresh in [True, False] * 10:
        frames = collected.collect(5, fresh=fresh)
        if (frames["age"] == 0).any():
            check_starts(frames)
        with torch.no_grad():
            policy.weight.add_(1)


def test_another_batch_size_the_second_time_is_refused() -> None:
    sizes = iter([2, 3])
    collected = Collected(lambda: make_pool(batch_size=next(sizes)), max_env_faults=1)
    collected.engine.envs.members[0]._send = None  # calling it raises
    with pytest.raises(dc.EnvError, match="another batch_size than before, 3 instead of 2"):
        collected.collect(3)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("slowest", [1.5, 6, 100])
def test_rows_of_different_speeds(slowest: float, batch_size: int, fresh: bool) -> None:
    """The fast ones wait for the slow ones, and lose frames only if too few others are at work."""
    pool, clock = make_pool(batch_size=batch_size), Clock()
    rng = np.random.default_rng(0)
    speeds = [1, 1.2, slowest, 1.1, slowest]
    UnevenPool(pool, lambda row: speeds[row] * rng.random(), clock=clock, sleep=clock.sleep)
    collected = Collected(pool)
    collected.collect_often(12, steps=10, fresh=fresh)
    collected.check()
    if not fresh and batch_size == 1:
        assert not collected.lost()


def test_reproducible_is_refused() -> None:
    with pytest.raises(dc.ArgumentError, match=r"reproducible=True does not work .* 2 of its 5"):
        Collected(make_pool(), exact_version=True)
