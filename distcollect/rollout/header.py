"""What the trainer knows of a rollout before it fetches the data, and the rollout once fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from distcollect.results import EnvFault
from distcollect.rollout.layout import Tensors
from distcollect.rollout.wire import WireForm

# (thread, activity, begin, end); times in nanoseconds of the clock of the process that measured.
Span = tuple[str, str, int, int]


class WorkReport(NamedTuple):
    """How a process has spent its time since its last report, and which episodes just ended.

    The episodes are those that ended in the rollout that the report comes with.

    Attributes:
        busy_ns: time spent collecting; the next three are parts of it.
        env_ns: time spent stepping and resetting envs.
        policy_ns: time spent choosing actions.
        swap_ns: time spent swapping weights in.
        wait_ns: time between two rollouts, waiting for a request.
        cpu_ns: CPU time that the stepping thread used while it collected.
        returns: the sum of rewards of each episode.
        lengths: the number of frames of each episode.
        metrics: for each metric of the monitor, its value at the last frame of each episode; None:
            no episode ended, or there are no metrics.
        rests: ids of trajectories with frames in the rollout that are only the rest of an episode:
            what came before was dropped.
        begun: ids of trajectories that begin with the first frame of a row.
        was_reset: all envs were reset before the rollout.
        queue_ns: of all answers of an inference server, the time from the request to the pass.
        forward_ns: the time that these passes took.
        num_answers: how many answers.
        num_rows: rows in these passes.
        num_computed: the same with padding.
    """

    busy_ns: int = 0
    env_ns: int = 0
    policy_ns: int = 0
    swap_ns: int = 0
    wait_ns: int = 0
    cpu_ns: int = 0
    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    metrics: Mapping[str, tuple[float, ...]] | None = None
    rests: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    was_reset: bool = False
    queue_ns: int = 0
    forward_ns: int = 0
    num_answers: int = 0
    num_rows: int = 0
    num_computed: int = 0


NO_WORK = WorkReport()
_FORMS = {form.value: form for form in WireForm}


class Header(NamedTuple):
    """What the trainer learns of a rollout before any of its data moves.

    A tuple: one object for garbage collection to look at, and pickled fast.

    Attributes:
        worker_id: the slot that collected it.
        incarnation: which process in that slot.
        sequence: counts the rollouts of this process from 0.
        num_frames: real frames in it; the others are padding.
        num_steps: T, steps of each row, with padding.
        num_bytes: size of its tensors.
        policy_version: (lowest, highest) version among its frames.
        stepped: frames that its process has stepped in all.
        lost: pairs (cause, frames): how many of these frames are in no rollout, by cause.
        env_faults: how often an env of its process raised.
        faults: the newest of these since the header before.
        work: how its process has spent its time.
        spans: what its process did when, for a trace; empty without a trace.
        wire_form: how its leaves lie in the tensors that travel.
    """

    worker_id: int
    incarnation: int
    sequence: int
    num_frames: int
    num_steps: int
    num_bytes: int
    policy_version: tuple[int, int]
    stepped: int = 0
    lost: tuple[tuple[str, int], ...] = ()
    env_faults: int = 0
    faults: tuple[EnvFault, ...] = ()
    work: WorkReport = NO_WORK
    spans: tuple[Span, ...] = ()
    wire_form: WireForm = WireForm.PACKED

    def __reduce__(self) -> Any:
        # By one name instead of three: to find each takes as long as all else of a header.
        *fields, work, spans, wire_form = self
        return _header, (*fields, tuple(work), spans, wire_form.value)


def _header(*values: Any) -> Header:
    *fields, work, spans, wire_form = values
    return Header._make((*fields, WorkReport._make(work), spans, _FORMS[wire_form]))


class Rollout(NamedTuple):
    """A rollout at the trainer: its header, and its tensors as they travelled."""

    header: Header
    tensors: Tensors
