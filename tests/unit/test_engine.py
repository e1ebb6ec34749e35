"""The engine: stopping it, swapping weights within a rollout, and counting its frames."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.counting_envs import CountingEnv, CountingMaker, CountingVectorEnv
from helpers.engines import Told, collect, offer

import distcollect as dc
from distcollect.common.step_counter import TASK, StepCounter, Task
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine
from distcollect.engine.interrupts import Stopped
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.slab import Slab

N, T = 2, 6
# "native-next" uses the engine's other loop, as its rows drift apart.
KINDS = ["plain", "sync-next", "native-next"]


def engine_of(policy: Any = None, kind: str = "plain", **options: Any) -> Engine:
    maker = CountingMaker(kind, N, lengths=options.pop("lengths", (3, 1, 4, 2)))
    plan = WorkerPlan(maker, N, policy, **options)
    return build_engine(plan, traj_ids=count(100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 3, T])
def test_a_swap_in_mid_rollout(kind: str, at: int) -> None:
    """The frame whose action is being chosen keeps its version; the next frame has the new one."""
    policy = Told()
    engine = engine_of(policy, kind, lengths=(100,))
    start = policy.calls
    policy.at_call = lambda call: offer(engine.weights, 7) if call == start + at else None
    batch = collect(engine, T)
    version = batch["collector", "policy_version"]
    assert version.tolist() == [[0] * at + [7] * (T - at)] * N
    assert torch.equal(batch["told"].long(), version)
    after = collect(engine, T)
    assert (after["collector", "policy_version"] == 7).all()
    assert (after["told"] == 7).all()


@pytest.mark.parametrize("fresh", [False, True])
def test_how_many_frames_a_rollout_may_take(fresh: bool) -> None:
    lengths = (1, *[1000] * 5)
    engine = build_engine(WorkerPlan(lambda: Uneven(lengths), 6), traj_ids=count())
    most = 0
    for _ in range(5):
        before = engine.counter.stepped
        collect(engine, T, fresh=fresh)
        most = max(most, engine.counter.stepped - before)
    assert 6 * T < most <= engine.layout.skew * 6 * T
    assert engine_of(None).layout.skew == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_of_several_versions_and_random_frames(kind: str) -> None:
    """Random frames show nothing of those that the same memory had before."""
    engine = engine_of(Told(), kind)
    slab = Slab(engine.layout, T)
    offer(engine.weights, 1)
    offer(engine.weights, 2)
    assert (collect(engine, T, slab=slab, fresh=True)["told"] == 2).all()
    offer(engine.weights, 3)
    batch = collect(engine, T, slab=slab, random=True, fresh=True)
    assert (batch["collector", "policy_version"] == 3).all()
    assert not batch["told"].any()
    assert (collect(engine, T, slab=slab, fresh=True)["told"] == 3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_stop(kind: str) -> None:
    """The running step is finished, no other begins; and the engine stays stopped."""
    policy = Told()
    engine = engine_of(policy, kind, lengths=(100,))
    collect(engine, T)
    start = policy.calls
    policy.at_call = lambda call: engine.stop() if call == start + 3 else None
    with pytest.raises(Stopped):
        collect(engine, T)
    assert policy.calls == start + 3
    assert engine.counter.lost == {"shut_down": 3 * N}
    with pytest.raises(Stopped):
        collect(engine, T)
    assert policy.calls == start + 3


# Rows that drift apart.


class Uneven(CountingVectorEnv):
    """Each row has episodes of its own length."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        envs = [CountingEnv(i, lengths=(length,)) for i, length in enumerate(lengths)]
        super().__init__(envs, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("lengths", [(1, 50), (3, 3), (50, 1, 2), (1, 1)])
def test_every_frame_is_accounted_for(lengths: tuple[int, ...], fresh: bool) -> None:
    env = Uneven(lengths)
    engine = build_engine(WorkerPlan(lambda: env, len(lengths)), traj_ids=count())
    delivered = 0
    for _ in range(12):
        delivered += collect(engine, T, fresh=fresh).numel()
        assert engine.counter.stepped == sum(each.num_steps for each in env.envs)
        held = engine.num_waiting
        assert held <= T * len(lengths)
        lost = engine.counter.lost.get("row_skew", 0)
        assert engine.counter.stepped == delivered + lost + held
    engine.seed([1] * len(lengths), [1] * len(lengths))
    delivered += collect(engine, T, fresh=fresh).numel()
    lost = engine.counter.lost.get("row_skew", 0)
    assert engine.counter.stepped == delivered + lost + engine.num_waiting
    assert set(engine.counter.lost) <= {"row_skew"}


@pytest.mark.parametrize(
    ("long", "played"),
    [(32, [1] * 8 + [32] * 8), (400, [1, 1, 400, 400])],
    ids=["frames lost after an end", "much longer than a rollout"],
)
def test_an_evaluation_has_whole_episodes_only(long: int, played: list[int]) -> None:
    """Row 1 makes twice as many frames, and loses some: what is left of an episode is no whole."""
    with dc.SyncDataCollector(lambda: Uneven((1, long)), None, frames_per_batch=16) as collector:
        evaluation = collector.evaluate(len(played), timeout_s=20)
    assert sorted(evaluation.lengths.tolist()) == played


@pytest.mark.parametrize("kind", KINDS)
def test_memory_given_from_outside_is_exact_between_any_two_steps(kind: str) -> None:
    """When the policy is called, all earlier steps are counted."""
    memory = np.zeros(4, np.int64)
    policy = Told()
    maker = CountingMaker(kind, N, lengths=(100,))
    engine = build_engine(
        WorkerPlan(maker, N, policy), traj_ids=count(), counter=StepCounter(memory)
    )
    start = policy.calls
    seen: list[list[int]] = []
    policy.at_call = lambda call: seen.append([call - start, *memory[:2].tolist()])
    for rollouts in (1, 2):
        collect(engine, T)
        assert memory[:2].tolist() == [rollouts * N * T, 0]
        assert engine.counter.stepped == rollouts * N * T
    assert seen == [[step + 1, step * N, 1] for step in range(2 * T)]


def test_an_interrupted_rollout_is_lost_as_a_whole() -> None:
    """No trajectory continues after the gap that Ctrl-C left."""
    policy = Told()
    engine = engine_of(policy, lengths=(100,))
    last_ids = collect(engine, T)["collector", "traj_ids"][:, -1]

    def interrupt(call: int) -> None:
        policy.at_call = lambda call: None
        raise KeyboardInterrupt

    policy.at_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        collect(engine, T)
    assert engine.counter.cells[TASK] == Task.IDLE
    batch = collect(engine, T)
    assert not (batch["collector", "traj_ids"][:, 0] == last_ids).any()
    assert (batch["observation"][:, 0, 2] == 0).all()


@pytest.mark.parametrize("kind", ["plain", "sync-next"])
def test_cut_lengths_start_again_with_a_reset(kind: str) -> None:
    engine = engine_of(kind=kind, max_frames_per_traj=4, lengths=(100,))
    collect(engine, 3)
    engine.seed([1] * N, [1] * N)
    ends = collect(engine, 4)["next", "truncated"][..., 0]
    assert ends.tolist() == [[False, False, False, True]] * N


def test_an_error_closes_the_envs() -> None:
    env = CountingEnv()
    with pytest.raises(Exception, match="boom"):
        build_engine(WorkerPlan(env, 1, policy_factory=lambda: _raise("boom")), traj_ids=count())
    assert env.closed


def _raise(message: str) -> Any:
    raise RuntimeError(message)
