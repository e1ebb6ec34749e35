"""Ids of processes on the wire, and the ranges of trajectory ids that belong to them."""

from __future__ import annotations

import secrets

from distcollect.errors import LaunchError

_MAX_PEER = 2**15 - 1  # torch sends ids as signed 16-bit integers

# A process numbers its trajectories from its id times this: unique over the run, below 2**63.
TRAJ_IDS_PER_PEER = 1 << 40
TRAJ_IDS_PER_TRAINER = (_MAX_PEER + 1) * TRAJ_IDS_PER_PEER


class Identity:
    """Which of a run's trainers this process is, and the ids that it gives to its workers.

    Of k trainers, number t has the id t and gives out t + k, t + 2k, …: all ids are unique over the
    run, and none is given out twice, as torch caches connections by id.

    Attributes:
        run_id: the same for all trainers of a run.
        trainer: the number of this trainer, counted from 0; also its id.
        num_trainers: how many trainers the run has.
        next_peer: the id that is given out next; higher than all before.
    """

    def __init__(self, run_id: str, trainer: int = 0, num_trainers: int = 1) -> None:
        self.run_id = run_id
        self.trainer = trainer
        self.num_trainers = num_trainers
        self.next_peer = trainer + num_trainers

    def new_peer(self) -> int:
        """A new id, for a process that is about to join.

        Raises:
            LaunchError: all have been used.
        """
        peer = self.next_peer
        if peer > _MAX_PEER:
            raise LaunchError(
                f"all {_MAX_PEER // self.num_trainers} ids for worker processes are used up; "
                "restart the trainer"
            )
        self.next_peer += self.num_trainers
        return peer


# The same for the whole life of this process, as torch refuses a second id.
_identity = Identity(secrets.token_hex(8))


def identity() -> Identity:
    """The identity of this process as a trainer."""
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
