"""How lost workers ended, for the user's thread to look up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distcollect.common.signals import Wakeup
from distcollect.errors import DistCollectError


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
