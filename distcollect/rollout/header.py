"""What a trainer is told of a rollout before it fetches it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from distcollect.rollout.layout import (
    Tensors,
)


class Work(NamedTuple):
    """What a process has done since its first rollout; all but the episodes in nanoseconds.

    Attributes:
        busy_ns: time spent collecting; the next three are parts of it.
        env_ns: time spent stepping and resetting envs.
        policy_ns: time spent choosing actions.
        swap_ns: time spent swapping weights in.
        wait_ns: time between two rollouts, waiting for a request.
        cpu_ns: CPU time that the stepping thread used while it collected.
        returns: sums of rewards of the episodes that ended in the last rollout.
        lengths: their lengths, in frames.
    """

    busy_ns: int = 0
    env_ns: int = 0
    policy_ns: int = 0
    swap_ns: int = 0
    wait_ns: int = 0
    cpu_ns: int = 0
    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()


NO_WORK = Work()


@dataclass(frozen=True)
class Header:
    """What the trainer learns of a rollout before any of its data moves.

    Attributes:
        worker_id: the slot that collected it.
        incarnation: which process in that slot.
        sequence: counts the rollouts of this process from 0.
        num_frames: real frames in it; the others are padding.
        num_steps: T, steps of each row, with padding.
        num_bytes: size of its tensors.
        policy_version: (lowest, highest) version among its frames.
        stepped: frames its process has stepped in all.
        lost: of these, the frames that are in no rollout, by cause.
        env_faults: how often an env of its process raised.
        work: what its process has done.
        spans: what its process did when, for a trace; empty where there is none.
    """

    worker_id: int
    incarnation: int
    sequence: int
    num_frames: int
    num_steps: int
    num_bytes: int
    policy_version: tuple[int, int]
    stepped: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    env_faults: int = 0
    work: Work = NO_WORK
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """A rollout at the trainer: its header and its tensors in wire order."""

    header: Header
    tensors: Tensors


# (thread, what it did, begin, end), in nanoseconds of the clock of the process that noted it.
Span = tuple[str, str, int, int]
