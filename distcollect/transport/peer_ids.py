"""Ids of processes on the wire, and of the trajectories that they number."""

from __future__ import annotations

import secrets

from distcollect.errors import (
    LaunchError,
)

_MAX_PEER = 2**15 - 1  # ids are 16-bit on torch's wire


# A process numbers its trajectories from its id times this: unique over the run, below 2**63.
TRAJ_IDS_PER_PEER = 1 << 40


TRAJ_IDS_PER_TRAINER = (_MAX_PEER + 1) * TRAJ_IDS_PER_PEER


class Identity:
    """A trainer's place among those of its run, and the ids that it deals out there.

    Of k trainers, number t has the id t and deals out t + k, t + 2k, …: all are unique over the
    run, and none is dealt out twice, as torch caches connections by id.

    Attributes:
        run_id: the same for all trainers of a run.
        trainer: this one's number among them, and its id.
        num_trainers: how many there are.
        next_peer: the id that is dealt out next; none that was is above.
    """

    def __init__(self, run_id: str, trainer: int = 0, num_trainers: int = 1) -> None:
        self.run_id = run_id
        self.trainer = trainer
        self.num_trainers = num_trainers
        self.next_peer = trainer + num_trainers

    def new_peer(self) -> int:
        """An id for a process that is to join.

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


# One for the whole life of this process, see above.
_identity = Identity(secrets.token_hex(8))


def identity() -> Identity:
    """This process's, for as long as it is a trainer."""
    return _identity


def identify(run_id: str, trainer: int, num_trainers: int) -> None:
    """Make this process one of a run's trainers; once it has a collector, it remains the same.

    Raises:
        LaunchError: it was another one.
    """
    global _identity  # noqa: PLW0603 - a process has one place in its run
    if (_identity.trainer, _identity.num_trainers) == (trainer, num_trainers):
        _identity.run_id = run_id
    elif _identity.next_peer == _identity.trainer + _identity.num_trainers:
        _identity = Identity(run_id, trainer, num_trainers)
    else:
        raise LaunchError(
            f"this process had a collector before it became trainer {trainer} of {num_trainers}: "
            "call distcollect.run(main) first"
        )
