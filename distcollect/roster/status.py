"""What the user's thread and the supervision thread of a collector's workers share."""

from __future__ import annotations

import enum
import threading

from distcollect.errors import DistCollectError
from distcollect.results import WorkerState
from distcollect.roster.membership import PRESENT
from distcollect.roster.worker_ends import WorkerEnds
from distcollect.transport.worker_service import WorkerInfo


class RunPhase(enum.Enum):
    """How far the workers of a collector are between their start and their end."""

    STARTING = enum.auto()  # the first processes have to become ready
    START_FAILED = enum.auto()  # one of the first processes was lost
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
        ends: how lost workers ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.phase = RunPhase.STARTING
        self.failure: DistCollectError | None = None
        self.states: dict[int, WorkerState] = {}
        self.worker_infos: dict[int, WorkerInfo] = {}
        self.ends = WorkerEnds()

    @property
    def num_present(self) -> int:
        """Workers that serve requests."""
        return sum(state in PRESENT for state in self.states.values())

    @property
    def is_starting(self) -> bool:
        return self.phase in (RunPhase.STARTING, RunPhase.START_FAILED)

    @property
    def is_stopping(self) -> bool:
        return self.phase is RunPhase.STOPPING

    @property
    def starts_processes(self) -> bool:
        """Return True if lost processes are replaced."""
        return self.failure is None and self.phase in (RunPhase.STARTING, RunPhase.RUNNING)

    def begin_run(self) -> None:
        """The first processes are ready."""
        self._follow(RunPhase.RUNNING, RunPhase.STARTING)

    def begin_stop(self) -> None:
        """The processes are being ended."""
        self._follow(RunPhase.STOPPING, *RunPhase)

    def fail_start(self) -> None:
        """One of the first processes was lost: what is wrong with it is wrong with the run."""
        self._follow(RunPhase.START_FAILED, RunPhase.STARTING)

    def _follow(self, phase: RunPhase, *before: RunPhase) -> None:
        with self.lock:
            if self.phase in before:
                self.phase = phase
            self.changed.notify_all()

    def fail(self, error: DistCollectError) -> None:
        """The run can't go on."""
        with self.lock:
            self.failure = self.failure or error
            self.fail_start()
