"""What the user's thread and the supervision thread of a collector's workers share."""

from __future__ import annotations

import enum
import threading

from distcollect.errors import DistCollectError
from distcollect.results import WorkerState
from distcollect.roster.membership import PRESENT
from distcollect.roster.process import check_transition
from distcollect.roster.worker_ends import WorkerEnds
from distcollect.transport.worker_service import WorkerInfo


class Phase(enum.Enum):
    """How far the workers of a collector are between their start and their end."""

    STARTING = enum.auto()  # the first processes have to become ready
    START_FAILED = enum.auto()  # one of the first processes was lost
    RUNNING = enum.auto()  # a lost process is replaced
    FAILED = enum.auto()  # the run can't go on
    STOPPING = enum.auto()  # the processes are being ended
    CLOSED = enum.auto()  # all have ended


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.START_FAILED, Phase.RUNNING, Phase.STOPPING}),
    Phase.START_FAILED: frozenset({Phase.STOPPING}),
    Phase.RUNNING: frozenset({Phase.FAILED, Phase.STOPPING}),
    Phase.FAILED: frozenset({Phase.STOPPING}),
    Phase.STOPPING: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}


class Status:
    """The phase and what is known about the workers; the supervision thread writes most of it.

    Attributes:
        changed: notified after every change; its lock guards all attributes.
        phase: see :class:`Phase`; :meth:`enter` changes it.
        failure: why the run can't go on; None: it can.
        states: of each slot's worker, by worker_id; replaced as a whole.
        probes: worker_id to what the first process in its slot found when it was probed.
        ends: how lost workers ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.phase = Phase.STARTING
        self.failure: DistCollectError | None = None
        self.states: dict[int, WorkerState] = {}
        self.probes: dict[int, WorkerInfo] = {}
        self.ends = WorkerEnds()

    @property
    def num_present(self) -> int:
        """Workers that serve requests."""
        return sum(state in PRESENT for state in self.states.values())

    @property
    def is_starting(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.START_FAILED)

    @property
    def is_stopping(self) -> bool:
        return self.phase in (Phase.STOPPING, Phase.CLOSED)

    @property
    def has_ended(self) -> bool:
        """Whether the run can't go on, or is being ended."""
        return self.failure is not None or self.is_stopping

    @property
    def starts_processes(self) -> bool:
        """Whether lost processes are replaced."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    def enter(self, phase: Phase) -> None:
        """Change the phase.

        Raises:
            IllegalTransition: it can't follow the present one.
        """
        with self.lock:
            check_transition(_NEXT, self.phase, phase)
            self.phase = phase
            self.changed.notify_all()

    def begin_stop(self) -> bool:
        """Enter STOPPING; False if it was entered before."""
        with self.lock:
            if self.is_stopping:
                return False
            self.enter(Phase.STOPPING)
            return True

    def fail_start(self) -> None:
        """One of the first processes was lost: what is wrong with it is wrong with the run."""
        with self.lock:
            if self.phase is Phase.STARTING:
                self.enter(Phase.START_FAILED)

    def fail(self, error: DistCollectError) -> None:
        """The run can't go on."""
        with self.lock:
            self.fail_start()
            if self.phase is Phase.RUNNING:
                self.enter(Phase.FAILED)
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()
