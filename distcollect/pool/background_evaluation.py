"""Evaluations that run on evaluation workers while training goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace

from distcollect.config import EvaluationWorkers
from distcollect.errors import DistCollectError, EnvError, WorkerLost
from distcollect.pool.pool import Pool
from distcollect.results import Evaluation
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest, WorkerService

log = logging.getLogger(__name__)


class Evaluators:
    """Has evaluation workers evaluate the versions they get, the newest first.

    Attributes:
        results: of all evaluations, in the order of their end.
    """

    def __init__(
        self,
        pool: Pool,
        plan: EvaluationWorkers,
        worker_ids: Collection[int],
        stats_recorder: StatsRecorder,
    ) -> None:
        """Have these workers of ``pool`` evaluate as ``plan`` says, and record the results."""
        self._stats_recorder = stats_recorder
        self.results: list[Evaluation] = []
        self._pool = pool
        self._request = EvaluationRequest(
            plan.num_episodes, plan.deterministic, None, plan.timeout_s
        )
        self._worker_ids = worker_ids
        self._lock = threading.Lock()
        self._newest: dict[int, int] = {}  # worker_id to the version that it has
        self._busy: dict[int, int] = {}  # worker_id to the version that it evaluates
        self._resumed = 0, 0  # the version that the run was resumed with, and its number since
        self._parts: dict[int, list[Evaluation]] = {}  # of versions that others evaluate as well

    def has_weights(self, worker_id: int, version: int) -> None:
        """A worker has new weights, or has joined with its first ones."""
        # One that replaces the worker says itself when it has weights.
        if (
            worker_id not in self._worker_ids
            or self._pool.acknowledged.get(worker_id, -1) < version
        ):
            return
        with self._lock:
            self._newest[worker_id] = version
            if worker_id in self._busy:
                return
            self._busy[worker_id] = version
        # Not under the lock: this takes the pool's lock. Once the run has ended, nothing is called.
        with contextlib.suppress(DistCollectError):
            request = replace(self._request, with_weights=bool(self._stats_recorder.best))
            answer = self._pool.call(worker_id, WorkerService.evaluate, request)
            answer.add_done_callback(lambda answer: self._done(worker_id, answer))

    def resumed(self, before: int, version: int) -> None:
        """The weights of version ``before`` are ``version`` from now on, and none is older."""
        with self._lock:
            self._resumed = before, version
            results = map(self._renumbered, self.results)
            self.results[:] = [result for result in results if result is not None]

    def _renumbered(self, result: Evaluation) -> Evaluation | None:
        """A result with today's version; None if it is of weights that the run never had."""
        (before, version), found = self._resumed, result.policy_version
        if found.min() >= version:
            return result
        return (
            replace(result, policy_version=found.clamp(version)) if found.min() >= before else None
        )

    def _done(self, worker_id: int, answer: Future[Evaluation]) -> None:
        with self._lock:
            evaluated = self._busy.pop(worker_id)
            newest = self._newest[worker_id]
            error, result = answer.exception(), None
            if error is None:
                # Newer weights may have reached the worker before it began.
                evaluated = int(answer.result().policy_version[0])
                result = self._renumbered(answer.result())
                self._parts.setdefault(evaluated, []).append(answer.result())
            # Once no other worker plays this version, or has it to play next.
            awaited = {*self._busy.values(), *(self._newest[w] for w in self._busy)}
            for version in self._parts.keys() - awaited:
                parts = [*filter(None, map(self._renumbered, self._parts.pop(version)))]
                if parts:
                    self._stats_recorder.evaluated(Evaluation.joined(parts))
            if result is not None:
                self.results.append(replace(result, weights=None))
        if isinstance(error, EnvError):
            self._stats_recorder.evaluation_failed(error)
        if isinstance(error, WorkerLost):
            return  # its replacement evaluates when it has joined
        if error is not None:
            log.warning("worker %d could not evaluate version %d: %s", worker_id, evaluated, error)
        if newest > evaluated:
            self.has_weights(worker_id, newest)
