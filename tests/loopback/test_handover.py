"""Rollouts that are handed over to another trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.envs import StepCountEnv
from helpers.loopback_pool import loopback_collector, workers_of
from helpers.policies import ShownWeight
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc
from distcollect.common import peer_ids
from distcollect.common.peer_ids import Identity, identify, identity

SOON_S = 60
STEPS = 50


def make(**options: Any) -> dc.RPCDataCollector:
    arguments = {"frames_per_batch": 2 * STEPS, "envs_per_worker": 2, "num_workers": 1, **options}
    return loopback_collector(CountingMaker(), **arguments)


def settled(collector: dc.RPCDataCollector, condition: Callable[[dc.Frames], bool]) -> dc.Frames:
    """The ledger's sum once it is so; what happens on other threads takes its time."""
    eventually(lambda: condition(collector.ledger.total), SOON_S, lambda: collector.ledger)
    return collector.ledger.total


@pytest.fixture
def collector() -> Iterator[dc.RPCDataCollector]:
    collector = make()
    yield collector
    collector.shutdown()


def test_a_rollout_is_handed_over_and_taken(collector: dc.RPCDataCollector) -> None:
    reference = collector.hand_over(SOON_S)
    assert (reference.worker_id, reference.trainer, reference.num_frames) == (0, 0, 2 * STEPS)
    assert reference.policy_version == (0, 0)
    assert reference.num_bytes > 0
    assert "key" not in repr(reference)
    transport = workers_of(collector).transport
    assert transport.bytes_fetched == 0
    assert collector.ledger.total.delivered == 0
    stats = collector.stats()
    assert stats.frames == stats.delivered == stats.workers[0].frames == 2 * STEPS
    assert collector.bottleneck().bound != "unknown"
    batch = collector.take_over(reference, SOON_S)
    assert batch.shape == (2, STEPS)
    assert batch.names[-1] == "time"
    assert transport.bytes_fetched == reference.num_bytes
    assert settled(collector, lambda total: total.delivered == 2 * STEPS).lost == {}
    # The next rollout continues where this one, the worker's first, ended.
    following = collector.take_over(collector.hand_over(SOON_S), SOON_S)
    before = batch["next", "observation"][:, -1]
    ended = batch["next", "done"][:, -1]
    assert torch.equal(following["observation"][:, 0][~ended[:, 0]], before[~ended[:, 0]]), (
        "it isn't the rollout after it"
    )
    with pytest.raises(dc.RolloutGone, match=r"worker 0: .*it was taken already") as caught:
        collector.take_over(reference, SOON_S)
    assert caught.value.worker_id == 0


@pytest.mark.parametrize("length", [30, 10_000])
def test_no_trajectory_goes_on_over_a_rollout_that_the_taker_does_not_have(length: int) -> None:
    """The trainer that collects keeps each third one."""
    taken, rests = [], set[int]()
    with loopback_collector(
        StepCountEnv, frames_per_batch=20, num_workers=1, max_frames_per_traj=length
    ) as collector:
        for count in range(9):
            if count % 3 == 2:
                collector.next(SOON_S)
                continue
            taken.append(collector.take_over(collector.hand_over(SOON_S), SOON_S)[0])
            rests |= collector.rests
    frames = torch.cat(taken)
    ids, steps = frames["collector", "traj_ids"], frames["observation"][:, 0]
    assert torch.equal(ids[1:] == ids[:-1], steps[1:] == steps[:-1] + 1)
    assert rests == {*ids.tolist()} - {*ids[steps == 0].tolist()}


def test_its_memory_is_not_written_to_until_it_was_taken(collector: dc.RPCDataCollector) -> None:
    """A worker has memory for two rollouts, so the third one waits."""
    references = [collector.hand_over(SOON_S) for _ in range(2)]
    with pytest.raises(dc.BatchTimeout, match=r"other trainers to take 2 rollout\(s\)"):
        collector.hand_over(0.2)
    first = collector.take_over(references[0], SOON_S)
    third = collector.hand_over(SOON_S)
    second = collector.take_over(references[1], SOON_S)
    counts = [third.header.sequence, *(r.header.sequence for r in references)]
    assert sorted(counts) == [0, 1, 2]
    for earlier, later in ((first, second), (second, collector.take_over(third, SOON_S))):
        ended = earlier["next", "done"][:, -1, 0]
        after = earlier["next", "observation"][:, -1][~ended]
        assert torch.equal(later["observation"][:, 0][~ended], after)


def test_who_comes_too_late_gets_nothing(collector: dc.RPCDataCollector) -> None:
    reference = collector.hand_over(SOON_S, keep_s=0.05)
    total = settled(collector, lambda total: bool(total.lost))
    assert total.lost == {"not_taken": 2 * STEPS}
    with pytest.raises(dc.RolloutGone, match=r"worker 0: .*not taken within 0\.05 s"):
        collector.take_over(reference, SOON_S)
    for _ in range(3):  # its memory is free again
        collector.take_over(collector.hand_over(SOON_S), SOON_S)
    assert settled(collector, lambda total: total.delivered == 6 * STEPS).lost == total.lost


def test_what_was_read_too_late_counts_for_nothing(collector: dc.RPCDataCollector) -> None:
    """A reader that dies or is too slow: nobody else gets the rollout."""
    reference = collector.hand_over(SOON_S)
    worker = workers_of(collector).services[0]
    worker.read_handover(reference.key, mapped=False)
    with pytest.raises(dc.RolloutGone, match="another trainer is reading it"):
        collector.take_over(reference, SOON_S)
    worker.cancel_handover(reference.key)
    with pytest.raises(dc.RolloutGone, match="took it back"):
        worker.confirm_handover(reference.key)
    settled(collector, lambda total: total.lost == {"not_taken": 2 * STEPS})


class FullOnce:
    """A buffer whose second extend() raises."""

    def __init__(self) -> None:
        self.num_calls = self.num_frames = 0

    def extend(self, data: TensorDict) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            raise ValueError("full")
        self.num_frames += data.numel()


def test_what_was_taken_and_the_buffer_refused_outlives_the_next_hand_over() -> None:
    buffer = FullOnce()
    with make(replay_buffer=buffer) as collector:
        collector.next()
        reference = collector.hand_over(SOON_S)
        with pytest.raises(ValueError, match="full"):
            collector.take_over(reference, SOON_S)
        other = collector.hand_over(SOON_S)
        collector.next()
        assert buffer.num_frames == 2 * 2 * STEPS
        collector.take_over(other, SOON_S)
        collector.next()
        assert buffer.num_frames == 4 * 2 * STEPS
        assert collector.ledger.total.delivered == 4 * 2 * STEPS
        assert collector.frames == 4 * 2 * STEPS


def test_one_whose_worker_dies_is_lost(collector: dc.RPCDataCollector) -> None:
    reference = collector.hand_over(SOON_S)
    workers = workers_of(collector)
    workers.transport.disconnect(workers.peers[0])
    workers.observer.lose(0, 0, replaced=True)
    assert settled(collector, lambda total: bool(total.lost)).lost["worker_lost"] >= 2 * STEPS
    with pytest.raises(dc.RolloutGone, match=r"worker 0: .*process has ended"):
        collector.take_over(reference, SOON_S)


def test_at_the_end_what_was_not_taken_is_accounted_for() -> None:
    with make() as collector:
        taken, reference = collector.hand_over(SOON_S), collector.hand_over(SOON_S)
        collector.take_over(taken, SOON_S)
    total = collector.ledger.total
    assert total.delivered == 2 * STEPS
    assert total.lost["shut_down"] >= 2 * STEPS
    assert "not_taken" not in total.lost
    with pytest.raises(dc.CollectorStateError, match="shut down"):
        collector.take_over(reference, SOON_S)
    with make() as other, pytest.raises(dc.WorkerError, match=r"doesn't have it|has ended"):
        other.take_over(reference, SOON_S)


def test_frames_handed_over_are_of_the_total() -> None:
    with make(total_frames=6 * STEPS) as collector:
        batch = next(iter(collector))
        one = collector.take_over(collector.hand_over(SOON_S), SOON_S)
        two = collector.take_over(collector.hand_over(SOON_S), SOON_S)
        assert collector.frames == 6 * STEPS
        with pytest.raises(StopIteration):
            collector.hand_over(SOON_S)
        ids = [b["collector", "traj_ids"].min().item() for b in (batch, one, two)]
        assert len(ids) == 3
        assert settled(collector, lambda total: total.delivered == 6 * STEPS).open == 0


def test_what_next_has_fetched_travels_along_if_there_is_no_other() -> None:
    with make(total_frames=10 * STEPS) as collector:
        for _ in range(2):
            collector.next(SOON_S)
        settled(collector, lambda total: total.stepped == 8 * STEPS)  # two more are here
        kinds = [collector.hand_over(SOON_S) for _ in range(3)]
        # While it has two rollouts to deliver, a single worker collects no other.
        assert [reference.tensors is None for reference in kinds] == [False, True, False]
        for reference in kinds:
            assert collector.take_over(reference, SOON_S).shape == (2, STEPS)
            with pytest.raises(dc.RolloutGone, match="taken already"):
                collector.take_over(reference, SOON_S)
        settled(collector, lambda total: total.delivered == 10 * STEPS)


def test_a_second_collector_hands_over_too() -> None:
    """Its worker and its rollouts have the numbers of those of the first one."""
    with make() as taker:
        for _ in range(2):
            with make(total_frames=4 * STEPS) as collector:
                collector.next(SOON_S)
                settled(collector, lambda total: total.stepped == 4 * STEPS)
                reference = collector.hand_over(SOON_S)
                assert reference.tensors is not None
                assert taker.take_over(reference, SOON_S).shape == (2, STEPS)


def test_one_is_taken_back_if_the_user_waits_no_longer(
    collector: dc.RPCDataCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = workers_of(collector).transport
    answers, late = [], Future[Any]()
    hand_over = transport.hand_over

    def answer_late(*args: Any) -> Future[Any]:
        answers.append(hand_over(*args))
        return late

    with monkeypatch.context() as patched:
        patched.setattr(transport, "hand_over", answer_late)
        with pytest.raises(dc.BatchTimeout):
            collector.hand_over(0.2, keep_s=1e6)
    late.set_result(answers[0].result(SOON_S))
    settled(collector, lambda total: total.lost == {"not_taken": 2 * STEPS})
    collector.take_over(collector.hand_over(SOON_S), SOON_S)


def test_the_lag_and_the_shape_are_the_takers() -> None:
    policy = ShownWeight()
    with make(
        policy=policy,
        envs_per_worker=1,
        frames_per_batch=STEPS,
        staleness=dc.Staleness(0, mode="mask"),
        split_trajs=True,
    ) as collector:
        reference = collector.hand_over(SOON_S)
        collector.update_policy_weights_(policy)
        batch = collector.take_over(reference, SOON_S)
        assert not batch["collector", "mask"].any()
        assert batch.shape[0] > 1, "one row for each trajectory"
        assert collector.version_lag == (1, 1.0, 1)
        assert collector.stale_frames == {0: 0}, "those that another trainer's worker stepped"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sync": True}, "is for sync=False"),
        ({"reproducible": True}, "is not for reproducible"),
        ({"trajs_per_batch": 2}, "is not for trajs_per_batch"),
        ({"normalize": dc.Normalize()}, "is not for normalize"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], reason: str) -> None:
    with make(**options) as collector:
        with pytest.raises(dc.CollectorStateError, match=rf"hand_over\(\) {reason}"):
            collector.hand_over()
        with pytest.raises(dc.CollectorStateError, match=rf"take_over\(\) {reason}"):
            collector.take_over(None)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused(collector: dc.RPCDataCollector) -> None:
    for keep_s in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="keep_s"):
            collector.hand_over(SOON_S, keep_s=keep_s)
    with pytest.raises(TypeError, match="keep_s=None"):
        collector.hand_over(SOON_S, keep_s=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"take_over\('x'\)"):
        collector.take_over("x")  # type: ignore[arg-type]
    reference = collector.hand_over(SOON_S)
    with pytest.raises(ValueError, match="is of another run"):
        collector.take_over(replace(reference, run_id="another"), SOON_S)
    collector.take_over(reference, SOON_S)


def test_a_worker_that_does_not_answer_is_named(
    collector: dc.RPCDataCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = collector.hand_over(SOON_S)
    transport = workers_of(collector).transport
    monkeypatch.setattr(transport, "fetch_handover", lambda *_: Future())
    with pytest.raises(dc.DeadlineError, match=r"rollout 0 of worker 0 of trainer 0 .* 0\.1 s"):
        collector.take_over(reference, 0.1)
    monkeypatch.undo()
    collector.take_over(reference, SOON_S)


def test_a_process_remains_the_trainer_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could give out ids of another trainer."""
    monkeypatch.setattr(peer_ids, "_identity", Identity("before"))
    identify("run", 1, 2)
    assert (identity().run_id, identity().new_peer()) == ("run", 3)
    identify("again", 1, 2)
    assert (identity().run_id, identity().new_peer()) == ("again", 5)
    with pytest.raises(dc.LaunchError, match="before it became trainer 0 of 2"):
        identify("run", 0, 2)
