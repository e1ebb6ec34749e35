"""Evaluations that run on evaluation workers while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future

from distcollect.errors import WorkerLost
from distcollect.results import Evaluation

log = logging.getLogger(__name__)


class Evaluators:
    """Has workers that were set aside evaluate each version they get, the newest first.

    Attributes:
        results: in the order in which they came.
    """

    def __init__(
        self, ask: Callable[[int], Future[Evaluation]], worker_ids: Collection[int]
    ) -> None:
        """Ask these workers by ``ask(worker_id)``."""
        self.results: list[Evaluation] = []
        self._ask = ask
        self._worker_ids = worker_ids
        self._lock = threading.Lock()
        self._newest: dict[int, int] = {}  # version that a worker has
        self._busy: dict[int, int] = {}  # and the one it evaluates

    def has_weights(self, worker_id: int, version: int) -> None:
        """A worker has new weights; or is there, with its first."""
        if worker_id not in self._worker_ids:
            return
        with self._lock:
            self._newest[worker_id] = version
            if worker_id in self._busy:
                return
            self._busy[worker_id] = version
        # Not under the lock: who is asked has locks of its own.
        self._ask(worker_id).add_done_callback(lambda answer: self._done(worker_id, answer))

    def _done(self, worker_id: int, answer: Future[Evaluation]) -> None:
        with self._lock:
            evaluated = self._busy.pop(worker_id)
            newest = self._newest[worker_id]
            error = answer.exception()
            if error is None:
                self.results.append(answer.result())
                # A newer one than it was asked for may have come before it began.
                evaluated = int(answer.result().policy_version[0])
        if isinstance(error, WorkerLost):
            return  # who takes its place will be asked
        if error is not None:
            log.warning("worker %d could not evaluate version %d: %s", worker_id, evaluated, error)
        if newest > evaluated:
            self.has_weights(worker_id, newest)
