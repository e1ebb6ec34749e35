"""Ids of processes, and the trajectory ids that belong to them.

A trajectory id is below 2**63. A process has a block of 2**34 of them, number ``id`` of those that
begin at the run's :attr:`Identity.first_traj_id`. When the run is resumed, that begins above all
blocks of its earlier life. So one trainer can start 2**29 processes in all lives of a run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from itertools import count

from distcollect.errors import LaunchError, WorkerError

TRAJ_IDS_PER_PEER = 1 << 34
# A collector that steps its envs in this process takes as many of its block's ids at a time.
_OWN_IDS_AT_ONCE = 1 << 20
_END_OF_TRAJ_IDS = 1 << 63
# The state of a run is saved by one of its trainers, which doesn't know how many processes the
# others have started. So with several trainers each life of a run takes this many blocks.
_PEERS_PER_LIFE = 1 << 20


def traj_ids_of(peer: int, first_traj_id: int) -> Iterator[int]:
    """Yield the trajectory ids of a worker process.

    Args:
        peer: the process's id.
        first_traj_id: where the blocks of this life of the run begin.

    Raises:
        WorkerError: all of them have been used.
    """
    first = first_traj_id + peer * TRAJ_IDS_PER_PEER
    yield from range(first, first + TRAJ_IDS_PER_PEER)
    raise WorkerError(
        f"this process has used all of its {TRAJ_IDS_PER_PEER:,} trajectory ids: another process "
        "has to replace it"
    )


class Identity:
    """Which of a run's trainers this process is, and the ids that it gives to its workers.

    Of k trainers, number t has the id t and gives out t + k, t + 2k, …: all ids are unique over
    this life of the run, and none is given out twice.

    Attributes:
        run_id: the same for all trainers of a run.
        trainer: the number of this trainer, counted from 0; also its id.
        num_trainers: how many trainers the run has.
        next_peer: the id that is given out next; higher than all before.
        first_traj_id: the trajectory ids of this life of the run begin here; the same for all
            trainers.
    """

    def __init__(self, run_id: str, trainer: int = 0, num_trainers: int = 1) -> None:
        self.run_id = run_id
        self.trainer = trainer
        self.num_trainers = num_trainers
        self.next_peer = trainer + num_trainers
        self.first_traj_id = 0
        self._num_earlier = 0  # ids that were given out before the open collectors
        self._own_parts: set[int] = set()  # the parts of this process's block that are in use
        self._lock = threading.Lock()

    def new_peer(self) -> int:
        """Return a new id, for a process that is about to join.

        Raises:
            LaunchError: there is none left.
        """
        with self._lock:
            peer = self.next_peer
            if self.num_trainers > 1 and peer >= _PEERS_PER_LIFE:
                raise LaunchError(
                    f"this trainer has started {_PEERS_PER_LIFE // self.num_trainers:,} worker "
                    "processes, and has no trajectory ids for more; resume the run from a "
                    "checkpoint"
                )
            if self.first_traj_id + (peer + 1) * TRAJ_IDS_PER_PEER > _END_OF_TRAJ_IDS:
                raise LaunchError(
                    f"there are no trajectory ids below {_END_OF_TRAJ_IDS:,} for one more worker "
                    "process; begin a new run, without the state of this one"
                )
            self.next_peer += self.num_trainers
            return peer

    def restart_traj_ids(self) -> None:
        """Give the workers that are started from now on the same trajectory ids as the first ones.

        So equal seeds give equal batches. To be called when a collector is opened, while no other
        one has workers.
        """
        with self._lock:
            self._num_earlier = self.next_peer - self.trainer - self.num_trainers

    @property
    def workers_first_traj_id(self) -> int:
        """The run's first trajectory id, as the workers of the open collectors are told it.

        It may be below 0; the ids of these workers are not.
        """
        return self.first_traj_id - self._num_earlier * TRAJ_IDS_PER_PEER

    @property
    def next_traj_id(self) -> int:
        """All trajectory ids of this life of the run, of all trainers, are below."""
        num_blocks = self.next_peer if self.num_trainers == 1 else _PEERS_PER_LIFE
        return self.first_traj_id + num_blocks * TRAJ_IDS_PER_PEER

    def own_traj_ids(self) -> OwnTrajIds:
        """Return trajectory ids for a collector that steps its envs in this process."""
        return OwnTrajIds(self)

    def take_own_part(self, above: int) -> tuple[int, range]:
        """Take a part of this process's block that is not in use; return its number and its ids.

        There are more parts than a process can use in its life.

        Args:
            above: its number is higher.
        """
        with self._lock:
            part = next(each for each in count(above + 1) if each not in self._own_parts)
            self._own_parts.add(part)
        first = self.first_traj_id + self.trainer * TRAJ_IDS_PER_PEER + part * _OWN_IDS_AT_ONCE
        return part, range(first, first + _OWN_IDS_AT_ONCE)

    def free_own_parts(self, parts: list[int]) -> None:
        """Let others use these parts of this process's block."""
        # Without the lock, which the thread may hold where an iterator is collected as garbage.
        self._own_parts.difference_update(parts)

    def resume(self, first_traj_id: int) -> int:
        """Begin another life of the run: give out only trajectory ids from this one on.

        If processes have been started, the ids begin above theirs too: another collector of this
        process may have such processes, which keep their ids.

        Returns:
            Where they begin: there, or later.

        Raises:
            LaunchError: there would not be enough for the processes of this life of the run.
        """
        with self._lock:
            first = max(self.first_traj_id, first_traj_id)
            if self.next_peer > self.trainer + self.num_trainers:
                first = max(first, self.next_traj_id)
            num_blocks = self.next_peer if self.num_trainers == 1 else _PEERS_PER_LIFE
            if first + num_blocks * TRAJ_IDS_PER_PEER > _END_OF_TRAJ_IDS:
                raise LaunchError(
                    f"the run has used the trajectory ids below {first:,}, and too few remain "
                    f"below {_END_OF_TRAJ_IDS:,}; begin a new run, without its state"
                )
            self.first_traj_id = first
            self._num_earlier = 0
            return first


class OwnTrajIds(Iterator[int]):
    """Trajectory ids for a collector that steps its envs in this process; they rise, without end.

    Until it is freed or gone, no other one gives the same. One that is alone begins with the same
    id each time, so that equal seeds give equal batches.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._parts: list[int] = []
        self._ids = iter(range(0))

    def __next__(self) -> int:
        for traj_id in self._ids:
            return traj_id
        part, ids = self._identity.take_own_part(max(self._parts, default=-1))
        self._parts.append(part)
        self._ids = iter(ids)
        return next(self._ids)

    def free(self) -> None:
        """Let others use the same ids: the collector was shut down."""
        # Once: when it is collected as garbage, others may have these parts already.
        parts, self._parts = self._parts, []
        self._identity.free_own_parts(parts)

    __del__ = free


# The same for the whole life of this process, as ids are never given out twice.
_identity = Identity(secrets.token_hex(8))


def identity() -> Identity:
    """Return the identity of this process as a trainer."""
    return _identity


def identify(run_id: str, trainer: int, num_trainers: int) -> None:
    """Make this process the given trainer of a run.

    Raises:
        LaunchError: it had a collector as another trainer already.
    """
    global _identity  # noqa: PLW0603 - a process has one identity
    if (_identity.trainer, _identity.num_trainers) == (trainer, num_trainers):
        _identity.run_id = run_id
    elif _identity.next_peer == _identity.trainer + _identity.num_trainers:
        _identity = Identity(run_id, trainer, num_trainers)
    else:
        raise LaunchError(
            f"this process had a collector before it became trainer {trainer} of {num_trainers}: "
            "call distcollect.run(main) first"
        )
