"""A preempted rollout has the frames made so far, and padding that is marked as such."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.counting_envs import CountingEnv, CountingMaker, CountingVectorEnv, Frame, check_frames
from helpers.engines import Told, collect, offer
from helpers.loopback_pool import LoopbackWorkers, loopback_collector
from helpers.loopback_transport import answer_of
from tensordict import TensorDict

import distcollect as dc
from distcollect.config import Faults
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine
from distcollect.engine.pickled_plan import TensorTable
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Rollout
from distcollect.rollout.slab import Slab
from distcollect.transport.protocol import CollectRequest
from distcollect.transport.worker_service import WorkerService

N, T = 3, 8
LENGTHS = (3, 1, 4, 2)
KINDS = ["plain", "sync-next", "sync-same", "native-disabled", "native-next", "native-same"]


class Run:
    """An engine, and the rollouts it collected."""

    def __init__(self, create_env: Any) -> None:
        self.policy = Told()
        plan = WorkerPlan(create_env, N, self.policy)
        self.engine: Engine = build_engine(plan, traj_ids=count(100))
        self.slab = Slab(self.engine.layout, T)
        self.batches: list[TensorDict] = []

    def collect(self, preempt_at: int | None = None, **kwargs: Any) -> TensorDict:
        """Collect the next rollout; preempt it during its n-th step, counted from 1."""
        start = self.policy.calls
        if preempt_at is not None:
            self.policy.at_call = lambda call: (
                self.engine.preempt() if call == start + preempt_at else None
            )
        batch = collect(self.engine, T, self.slab, mask=True, **kwargs)
        self.policy.at_call = lambda call: None
        check_padding(batch)
        assert self.slab.num_frames == int(batch["collector", "mask"].sum())
        self.batches.append(batch)
        return batch

    def frames_of(self, row: int) -> TensorDict:
        """All real frames of a row, in order."""
        return torch.cat([b[row][b["collector", "mask"][row]] for b in self.batches])

    @property
    def delivered(self) -> int:
        return sum(int(batch["collector", "mask"].sum()) for batch in self.batches)

    @property
    def held(self) -> int:
        return self.engine.num_waiting


def check_padding(batch: TensorDict) -> None:
    mask = batch["collector", "mask"]
    # A row's real frames come first.
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    for key, value in batch.items(include_nested=True, leaves_only=True):
        if key == ("collector", "traj_ids"):
            assert (value[~mask] == -1).all()
            assert (value[mask] >= 0).all()
        elif key == ("collector", "policy_version"):
            for versions, real in zip(value, mask, strict=True):
                if real.any() and not real.all():
                    assert (versions[~real] == versions[real][-1]).all()
        else:
            assert not value[~mask].any(), f"{key} is not zero in the padding"


def check_row(frames: TensorDict, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Check all values of a row's frames, and that trajectories end with episodes."""
    check_frames(
        [
            Frame(
                {("observation",): frame["observation"].numpy()},
                {("action",): frame["action"].numpy()},
                frame["next", "reward"],
                {("observation",): frame["next", "observation"].numpy()},
                frame["next", "terminated"],
                frame["next", "truncated"],
            )
            for frame in frames
        ],
        lengths=lengths,
    )
    ids, done = frames["collector", "traj_ids"], frames["next", "done"].flatten()
    assert torch.equal(ids.diff() != 0, done[:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 2, 5, T - 1, T])
def test_it_ends_after_the_step_under_way_and_goes_on_from_there(kind: str, at: int) -> None:
    """No frame is missing, and no trajectory is cut."""
    run = Run(CountingMaker(kind, N, lengths=LENGTHS))
    for preempt_at in (None, at, at, None):
        start = run.policy.calls
        batch = run.collect(preempt_at)
        if preempt_at and kind != "native-next":  # it may have frames left over
            assert run.policy.calls - start == at
            assert batch["collector", "mask"].sum(1).tolist() == [at] * N
        if preempt_at is None:
            assert batch["collector", "mask"].all()
    for row in range(N):
        check_row(run.frames_of(row))
    assert run.engine.counter.stepped == run.delivered + run.held
    assert not run.engine.counter.lost


class Uneven:
    """A native vector env whose rows drift apart by more than a rollout."""

    LENGTHS = ((1,), (50,), (3,))

    def __call__(self) -> CountingVectorEnv:
        envs = [CountingEnv(i, lengths=lengths) for i, lengths in enumerate(self.LENGTHS)]
        return CountingVectorEnv(envs, AutoresetMode.NEXT_STEP)


def test_a_row_without_a_frame_is_all_padding() -> None:
    """A row only reset itself in the single step of the rollout."""
    run = Run(Uneven())
    while True:
        offer(run.engine.weights, len(run.batches) + 1)
        batch = run.collect(preempt_at=1, fresh=True)
        if not batch["collector", "mask"].any(1).all():
            break
    assert len(run.batches) < 10
    assert batch["collector", "mask"].any()
    assert (batch["collector", "policy_version"] == len(run.batches)).all()


def test_versions_and_extras() -> None:
    run = Run(CountingMaker("plain", N, lengths=(100,)))
    run.collect()
    start = run.policy.calls

    def at_call(call: int) -> None:
        if call == start + 2:
            offer(run.engine.weights, 7)
        if call == start + 4:
            run.engine.preempt()
            offer(run.engine.weights, 8)

    run.policy.at_call = at_call
    batch = run.collect()
    assert batch["collector", "policy_version"].tolist() == [[0, 0, 7, 7] + [7] * (T - 4)] * N
    assert batch["told"].tolist() == [[0, 0, 7, 7] + [0] * (T - 4)] * N
    assert (run.collect()["told"] == 8).all()


class Slow(CountingEnv):
    """Is slow, and signals when it has begun."""

    stepped: threading.Event
    pause_s = 0.02

    def step(self, action: Any) -> Any:
        time.sleep(self.pause_s)
        self.stepped.set()
        return super().step(action)


def test_through_a_transport() -> None:
    """The message overtakes the request that it ends; the header has the number of frames."""
    Slow.stepped = threading.Event()
    payload = TensorTable([]).pickled(WorkerPlan(lambda: Slow(lengths=(1000,)), N))
    workers = LoopbackWorkers(1, Faults(), lambda worker_id: payload)
    try:
        [peer] = workers.peers.values()
        probe = workers.worker_infos[0]
        workers.transport.call(peer, WorkerService.preempt, 0).result(5)
        offered = answer_of(workers.transport.collect, peer, CollectRequest(5000))
        assert Slow.stepped.wait(10)
        workers.transport.call(peer, WorkerService.preempt, 1).result(5)  # not the one under way
        workers.transport.call(peer, WorkerService.preempt, 0).result(5)
        header = offered.result(10).header
        assert header.num_steps == 5000
        assert 1 <= header.num_frames // N < 100
        assert header.stepped == header.num_frames
        tensors = answer_of(offered.result().fetch).result(10)
        batch = assemble(probe.layout, [Rollout(header, tensors)], mask=True)
        assert int(batch["collector", "mask"].sum()) == header.num_frames
        steps = header.num_frames // N
        assert batch["observation"][0, :steps, 2].tolist() == list(range(steps))
        assert batch["next", "observation"][0, :steps, 2].tolist() == list(range(1, steps + 1))
    finally:
        workers.close()


def test_padding_counts_nowhere_as_frames() -> None:
    """Padding counts neither in the lags of a batch nor as stale frames."""
    Slow.stepped = threading.Event()
    policy = Told()

    def make(context: dc.EnvContext) -> Slow:
        env = Slow(lengths=(1000,))
        env.pause_s = 0.02 if context.worker_id == 0 else 0.05
        return env

    with loopback_collector(
        make,
        policy,
        frames_per_batch=100,
        num_workers=2,
        sync=True,
        preemptive_threshold=0.5,
        staleness=dc.Staleness(max_policy_lag=0, mode="mask"),
    ) as collector:

        def publish() -> None:
            Slow.stepped.wait()
            time.sleep(0.2)
            collector.update_policy_weights_(Told())

        thread = threading.Thread(target=publish)
        thread.start()
        batch = collector.next(timeout_s=60)
        thread.join()
        traj_ids, versions = batch["collector", "traj_ids"], batch["collector", "policy_version"]
        real = traj_ids >= 0
        assert not real.all()
        old, new = (int((real & (versions == version)).sum()) for version in (0, 1))
        assert old > 0
        assert new > 0
        assert torch.equal(batch["collector", "mask"], real & (versions == 1))
        assert sum(collector.stale_frames.values()) == old
        lag = collector.version_lag
        assert lag is not None
        assert lag == (0, pytest.approx(old / (old + new)), 1)
