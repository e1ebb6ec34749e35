"""What a collector has collected so far, and what of it the user has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import TensorDict

from distcollect.collectors.batch_format import WholeTrajectories
from distcollect.results import LagStats
from distcollect.rollout.header import Header


@dataclass(frozen=True)
class Progress:
    """What the user has got of a collector so far, and the batch that comes next.

    It is replaced as a whole, by one assignment. So an exception in the user's thread, in whatever
    line, finds either the old or the new one: a batch that was collected and not returned is
    returned by the next call, and counted once.

    Attributes:
        frames: frames collected, with padding and with those of the run that was resumed.
        resumed_frames: those of the run that was resumed.
        batches: batches collected.
        resumes: how often the run was resumed.
        claimed: number of the last of the pool's deliveries that it contains.
        workers: ids of the workers whose frames are in the last batch.
        lag: the lags of the last batch.
        trajectories: with ``trajs_per_batch``: the trajectories that were not returned yet.
        ready: a batch that is complete, and that the user does not have yet.
    """

    frames: int = 0
    resumed_frames: int = 0
    batches: int = 0
    resumes: int = 0
    claimed: int = 0
    workers: tuple[int, ...] = ()
    lag: LagStats | None = None
    trajectories: WholeTrajectories | None = None
    ready: Ready | None = None


@dataclass(frozen=True)
class Ready:
    """A complete batch that the user does not have yet.

    Attributes:
        batch: the batch; None: all frames are collected, and no trajectory is whole.
        then: what has been collected, once the user has it.
        stamp: what it was made under; it is only for the user as long as that is so.
    """

    batch: TensorDict | None
    then: Progress
    stamp: object


@dataclass(frozen=True)
class Collected:
    """The rollouts of a batch, which a collector makes a batch of.

    Attributes:
        rows: as :meth:`.BatchFormat.shaped` takes them.
        headers: of the W rollouts.
        lag: the lags of their frames.
        number: the delivery's; 0 without workers.
    """

    rows: TensorDict
    headers: Sequence[Header]
    lag: LagStats
    number: int = 0
