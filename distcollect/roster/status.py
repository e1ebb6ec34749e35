"""What the user's thread and the supervision thread of a collector's workers share."""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distcollect.common.signals import Wakeup
from distcollect.errors import DistCollectError
from distcollect.results import WorkerState
from distcollect.roster.membership import PRESENT
from distcollect.transport.worker_service import WorkerInfo


@dataclass(frozen=True, eq=False)
class WorkerEnd:
    """How a worker process ended.

    Attributes:
        error: says why, with pid and host.
        is_hang: it was ended because it made no progress.
    """

    error: DistCollectError
    is_hang: bool


class WorkerEnds:
    """The last end of a process in each worker's slot."""

    def __init__(self) -> None:
        self._changed = Wakeup()  # the user's thread waits for it
        self._ends: dict[int, WorkerEnd] = {}

    def note(self, worker_id: int, end: WorkerEnd) -> None:
        """A worker's process has ended."""
        self._ends = {**self._ends, worker_id: end}
        self._changed.ring()

    def known(self) -> dict[int, WorkerEnd]:
        """The ends so far, by worker_id."""
        return self._ends

    def since(
        self, known: Mapping[int, WorkerEnd], worker_ids: Collection[int], timeout_s: float
    ) -> dict[int, WorkerEnd]:
        """The ends of these workers that are not in ``known``.

        A worker is lost before it is known how it ended. Waits for that up to ``timeout_s``, and
        returns without the ends that are not known by then.
        """

        def new() -> dict[int, WorkerEnd]:
            ends = self._ends.items()
            return {w: end for w, end in ends if w in worker_ids and end is not known.get(w)}

        self._changed.wait_until(lambda: len(new()) == len(worker_ids), timeout_s)
        return new()


class RunPhase(enum.Enum):
    """How far the workers of a collector are between their start and their end."""

    STARTING = enum.auto()  # the first processes have to become ready
    RUNNING = enum.auto()  # a lost process is replaced, unless the run has failed
    STOPPING = enum.auto()  # the processes are being ended, or have ended


class Status:
    """The phase and what is known about the workers; the supervision thread writes most of it.

    Attributes:
        changed: notified after every change; its lock guards all attributes.
        phase: see :class:`RunPhase`.
        failure: why the run can't go on; None: it can.
        states: of each slot's worker, by worker_id; replaced as a whole.
        worker_infos: worker_id to what the first process in its slot found when it was probed.
        processes: worker_id to pid and host of the newest process that was ready.
        ends: how lost workers ended.
        evaluating: ids of the workers that evaluate, and collect nothing.
    """

    def __init__(self, evaluating: Collection[int] = ()) -> None:
        self.evaluating = evaluating
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.phase = RunPhase.STARTING
        self.failure: DistCollectError | None = None
        self.states: dict[int, WorkerState] = {}
        self.worker_infos: dict[int, WorkerInfo] = {}
        self.processes: dict[int, tuple[int, str]] = {}
        self.ends = WorkerEnds()

    @property
    def num_present(self) -> int:
        """Workers that serve requests."""
        return sum(state in PRESENT for state in self.states.values())

    @property
    def num_collecting(self) -> int:
        """Of these, those that collect."""
        return sum(s in PRESENT for w, s in self.states.items() if w not in self.evaluating)

    @property
    def is_starting(self) -> bool:
        return self.phase is RunPhase.STARTING

    @property
    def is_stopping(self) -> bool:
        return self.phase is RunPhase.STOPPING

    def enter(self, phase: RunPhase) -> None:
        """Change the phase; one that is STOPPING stays."""
        with self.lock:
            self.phase = RunPhase.STOPPING if self.is_stopping else phase
            self.changed.notify_all()

    def fail(self, error: DistCollectError) -> None:
        """The run can't go on, because of ``error`` unless it has failed before."""
        with self.lock:
            self.failure = self.failure or error
            self.changed.notify_all()
