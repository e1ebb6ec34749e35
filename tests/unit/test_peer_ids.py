"""Ids of processes and trajectories last for the life of a run, and none is given out twice."""

from __future__ import annotations

from itertools import islice

import gymnasium as gym
import pytest

import distcollect as dc
from distcollect.common import peer_ids
from distcollect.common.peer_ids import TRAJ_IDS_PER_PEER, Identity, traj_ids_of

NUM_SLOTS, NUM_REPLACEMENTS, NUM_LIVES = 10_000, 100, 100


def block(identity: Identity, peer: int) -> range:
    """The trajectory ids of a worker process."""
    first = next(traj_ids_of(peer, identity.first_traj_id))
    return range(first, first + TRAJ_IDS_PER_PEER)


def resumed(state: int, trainer: int, num_trainers: int) -> Identity:
    """A new process as one of the trainers of a run that is resumed."""
    identity = Identity("run", trainer, num_trainers)
    identity.resume(state)
    return identity


def test_a_large_run_with_many_lives_never_repeats_an_id() -> None:
    """10,000 slots, of which each is replaced 100 times, in each of 100 lives."""
    num_processes = NUM_SLOTS * (1 + NUM_REPLACEMENTS)
    state = 0
    for _ in range(NUM_LIVES):
        identity = resumed(state, 0, 1)
        first = identity.new_peer()
        assert [identity.new_peer() for _ in range(9)] == list(range(first + 1, first + 10))
        identity.next_peer = first + num_processes - 1  # a million calls take time
        last = identity.new_peer()
        assert block(identity, first).start >= state  # above all ids of earlier lives
        state = identity.next_traj_id
        assert block(identity, last).stop <= state <= 2**63


def test_trainers_with_different_losses_never_repeat_an_id() -> None:
    """One trainer saves the state; it doesn't know how many processes the others have started."""
    k, state, seen = 8, 0, 0
    for life in range(NUM_LIVES):
        trainers = [resumed(state, t, k) for t in range(k)]
        dealt: set[int] = set()
        top = 0
        for trainer in trainers:
            # The first one, which saves, loses the fewest workers.
            trainer.next_peer += k * (12_500 * trainer.trainer if life % 2 else 125)
            peers = [trainer.new_peer() for _ in range(5)]
            assert not dealt & {*peers}
            dealt |= {*peers}
            starts = [block(trainer, peer).start for peer in peers]
            assert min(starts) >= seen
            top = max(top, block(trainer, peers[-1]).stop)
        state, seen = trainers[0].next_traj_id, top
        assert top <= state <= 2**63


def test_ids_that_are_used_up_are_an_error_before_one_is_given_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identity = Identity("run")
    identity.resume(2**63 - 4 * TRAJ_IDS_PER_PEER)
    peers = [identity.new_peer() for _ in range(3)]
    assert block(identity, peers[-1]).stop == 2**63
    with pytest.raises(dc.LaunchError, match="no trajectory ids below"):
        identity.new_peer()
    with pytest.raises(dc.LaunchError, match="too few remain"):
        identity.resume(identity.next_traj_id)
    assert identity.first_traj_id == 2**63 - 4 * TRAJ_IDS_PER_PEER

    monkeypatch.setattr(peer_ids, "_PEERS_PER_LIFE", 9)
    several = Identity("run", 1, 3)
    assert [several.new_peer(), several.new_peer() - 3] == [4, 4]
    with pytest.raises(dc.LaunchError, match="this trainer has started 3 worker processes"):
        several.new_peer()

    monkeypatch.setattr(peer_ids, "TRAJ_IDS_PER_PEER", 3)
    ids = traj_ids_of(2, 100)
    assert list(islice(ids, 3)) == [106, 107, 108]
    with pytest.raises(dc.WorkerError, match="used all of its 3 trajectory ids"):
        next(ids)


def test_workers_share_no_id_with_a_collector_that_was_opened_beside_another() -> None:
    identity = Identity("run")
    kept = [identity.own_traj_ids() for _ in range(2)]
    ids = {next(each) // TRAJ_IDS_PER_PEER for each in kept}
    for _ in range(2):
        identity.restart_traj_ids()
        first = identity.workers_first_traj_id
        started = {next(traj_ids_of(identity.new_peer(), first)) for _ in range(3)}
        beside = identity.own_traj_ids()
        ids_of_open = ids | {id_ // TRAJ_IDS_PER_PEER for id_ in (*started, next(beside))}
        assert len(ids_of_open) == 2 + 3 + 1


def test_open_collectors_in_this_process_share_no_trajectory_id() -> None:
    def opened() -> dc.SyncDataCollector:
        return dc.SyncDataCollector("CartPole-v1", None, frames_per_batch=100)

    def ids(collector: dc.SyncDataCollector) -> list[int]:
        return collector.next()["collector", "traj_ids"].tolist()

    with opened() as one:
        first, *_ = alone = ids(one)
        beside = []
        for _ in range(2):
            with opened() as two:
                beside.append(ids(two))
                assert not {*alone, *ids(one)} & {*beside[-1], *ids(two)}
        assert beside[0][0] == beside[1][0]  # equal seeds give equal batches beside another one too
    # It fails once the env is made, and who holds the error holds the collector.
    with pytest.raises(dc.ArgumentError, match="frames_per_batch=3") as failed:
        dc.SyncDataCollector(lambda: gym.make_vec("CartPole-v1", 2), None, frames_per_batch=3)
    with opened() as again:
        assert ids(again)[0] == first
    assert failed.value.__traceback__ is not None


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_the_workers_of_each_collector_begin_with_the_same_ids(num_trainers: int) -> None:
    """As long as no other collector is open; a resumed run continues above all of them."""
    identity = Identity("run", num_trainers - 1, num_trainers)

    def opened(num_workers: int) -> list[range]:
        first = identity.workers_first_traj_id
        starts = [next(traj_ids_of(identity.new_peer(), first)) for _ in range(num_workers)]
        return [range(start, start + TRAJ_IDS_PER_PEER) for start in starts]

    def highest(*collectors: list[range]) -> int:
        return max(block.stop for blocks in collectors for block in blocks)

    identity.restart_traj_ids()
    first = opened(3)
    beside = opened(2)  # the first one is still open
    assert len({block.start for block in [*first, *beside]}) == 5
    identity.restart_traj_ids()
    second = opened(3)
    assert second == first
    own = next(identity.own_traj_ids())
    assert not any(own in block for block in first)
    state = identity.next_traj_id
    assert state >= highest(first, beside)
    assert identity.resume(state) == state
    resumed = opened(2)
    assert min(block.start for block in resumed) >= state
    assert identity.next_traj_id >= highest(resumed)
