"""Ids of processes, and the trajectory ids that belong to them.

A trajectory id is below 2**63. A process has a block of 2**34 of them, number ``id`` of those that
begin at the run's :attr:`Identity.first_traj_id`. When the run is resumed, that begins above all
blocks of its earlier life. So one trainer can start 2**29 processes in all lives of a run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from distcollect.errors import LaunchError, WorkerError

TRAJ_IDS_PER_PEER = 1 << 34
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
        # The blocks of the open collectors that step their envs in this process.
        self._own: WeakKeyDictionary[Iterator[int], int] = WeakKeyDictionary()
        self._beside: list[int] = []  # ids whose blocks are for collectors beside another one
        self._lock = threading.RLock()

    def new_peer(self) -> int:
        """Return a new id, for a process that is about to join.

        Raises:
            LaunchError: there is none left.
        """
        with self._lock:
            peer = self.next_peer
            if self.num_trainers > 1 and peer >= _PEERS_PER_LIFE:
                num = _PEERS_PER_LIFE // self.num_trainers
                raise LaunchError(
                    f"this trainer has started {num:,} worker processes, and has no trajectory ids "
                    "for more; resume the run from a checkpoint"
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
        one has workers. Does nothing while an id stands for a collector without workers.
        """
        with self._lock:
            if all(peer == self.trainer for peer in self._own.values()):
                self._num_earlier = self.next_peer - self.trainer - self.num_trainers
                self._beside.clear()

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

    def own_traj_ids(self) -> Iterator[int]:
        """Return trajectory ids for a collector that steps its envs in this process.

        Until they are freed or gone, nobody else gets the same. A collector that is alone has this
        process's own block; another one beside it has the block of a new id, or the first of these
        that is free again. So equal seeds give equal batches, one after the other.
        """
        with self._lock:
            peer, first, taken = self.trainer, self.first_traj_id, {*self._own.values()}
            if peer in taken:
                free = [each for each in self._beside if each not in taken]
                if not free:
                    self._beside.append(self.new_peer())
                peer, first = (free or self._beside[-1:])[0], self.workers_first_traj_id
            ids = traj_ids_of(peer, first)
            self._own[ids] = peer
        return ids

    def free_traj_ids(self, ids: Iterator[int]) -> None:
        """Let others use the same ids: the collector was shut down."""
        self._own.pop(ids, None)

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
            if first + self.next_traj_id - self.first_traj_id > _END_OF_TRAJ_IDS:
                raise LaunchError(
                    f"the run has used the trajectory ids below {first:,}, and too few remain "
                    f"below {_END_OF_TRAJ_IDS:,}; begin a new run, without its state"
                )
            self.first_traj_id = first
            self._num_earlier = 0
            self._beside.clear()
            return first


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
