"""Calls of workers for other things than rollouts: methods of envs, and evaluation."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from distcollect.common.seeding import Stream, env_seed, shares
from distcollect.common.waiting import missing
from distcollect.errors import ArgumentTypeError, DeadlineError, EnvError, WorkerLost
from distcollect.pool.pool import Pool
from distcollect.pool.publisher import WorkerIds
from distcollect.results import Evaluation
from distcollect.roster.manager import Workers
from distcollect.roster.process import message_of
from distcollect.roster.status import WorkerEnd
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest, WorkerService

T = TypeVar("T")

# A worker that misses its deadline says so, or is ended; this long for that to arrive.
_ANSWER_S = 5.0


class EnvCall(NamedTuple):
    """A call of a method of the envs, see :meth:`.DataCollectorBase.call`."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout_s: float


class RemoteCalls:
    """The user's calls of workers.

    A worker that is lost meanwhile is left out, unless the user named the workers.
    """

    def __init__(
        self,
        pool: Pool,
        selected: Callable[[WorkerIds], Sequence[int]],
        workers: Workers,
        stats_recorder: StatsRecorder,
    ) -> None:
        """Call workers.

        Args:
            pool: calls them.
            selected: turns the user's ``worker_ids`` into ids.
            workers: may come and go by themselves: then it waits for some.
            stats_recorder: what to count faults of envs in.
        """
        self._stats_recorder = stats_recorder
        self._pool = pool
        self._selected = selected
        self._workers = workers
        self._ends = workers.ends

    def call(self, call: EnvCall, worker_ids: WorkerIds) -> dict[int, list[Any]]:
        """Call a method of all envs, see :meth:`.DataCollectorBase.call`; by worker_id."""
        try:
            pickle.dumps((call.args, call.kwargs))
        except Exception as error:
            raise ArgumentTypeError(
                f"call({call.method!r}): its arguments can't be pickled ({type(error).__name__}: "
                f"{error}), so they can't be sent to the workers; pass numbers, arrays or tensors"
            ) from error
        self._workers.await_enough()
        what, timeout_s = f"call({call.method!r})", call.timeout_s
        known = self._ends.known()
        called = self._pool.present if worker_ids is None else self._selected(worker_ids)
        answers = {w: self._pool.call(w, WorkerService.call_envs, *call) for w in called}
        # A worker whose envs take longer than timeout_s is ended, and how it ended says more.
        ends = self._await(what, answers, known, timeout_s)
        for worker_id, end in ends.items():
            if end.is_hang:
                raise DeadlineError(
                    f"worker {worker_id} did not answer {what} within {timeout_s:g} s, and is "
                    f"replaced: {message_of(end.error)}. If the call may take longer, give a "
                    "longer timeout_s"
                )
        return _answered(answers, ends, all_of_them=worker_ids is not None)

    def evaluate(self, request: EvaluationRequest, worker_ids: WorkerIds) -> Evaluation:
        """Play this many episodes in all, see :meth:`.DataCollectorBase.evaluate`."""
        self._workers.await_enough()
        deadline = time.monotonic() + request.timeout_s
        parts: list[Evaluation] = []
        known = self._ends.known()
        lost: list[str] = []  # how workers ended that were evaluating
        while owed := request.num_episodes - sum(len(part.returns) for part in parts):
            meanwhile = f"; lost meanwhile: {'; '.join(lost)}" if lost else ""
            # For those that replace workers that were lost by this, nobody waits.
            gives_up = bool(lost) and not self._workers.is_elastic
            if lost:
                self._workers.await_enough()
            named = None if worker_ids is None else self._selected(worker_ids)
            wait_s = 0.0 if gives_up else deadline - time.monotonic()
            selected = self._pool.await_evaluators(named, wait_s)
            if not selected:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"evaluate() had no worker for {request.timeout_s:g} s, as all are being "
                        "replaced, or wait for their first weights; timeout_s=... gives longer"
                        f"{meanwhile}"
                    )
                raise WorkerLost(f"no worker is there to evaluate the policy{meanwhile}")
            limit_s, has = max(0.0, deadline - time.monotonic()), self._pool.acknowledged
            # If workers are lost, others play their episodes in the next round, with other seeds.
            first = len(parts) << 16
            answers: dict[int, Future[Evaluation]] = {}
            with self._cancelled_by_errors(request, selected):
                for w, share in zip(selected, shares(owed, len(selected)), strict=True):
                    if share:
                        part = replace(
                            request,
                            num_episodes=share,
                            version=has.get(w, 0),
                            timeout_s=limit_s,
                            with_weights=request.with_weights and w == selected[0],
                        )
                        if request.seed is not None:
                            seed = env_seed(request.seed, first + w, stream=Stream.EVALUATION)
                            part = replace(part, seed=seed)
                        answers[w] = self._pool.call(w, WorkerService.evaluate, part)
                # The workers keep that deadline too, and their own errors say more.
                ends = self._await("evaluate()", answers, known, limit_s, meanwhile)
            for answer in answers.values():
                if isinstance(error := answer.exception(), EnvError):
                    self._stats_recorder.evaluation_failed(error)
            known = {**known, **ends}
            lost += [f"worker {w}: {message_of(end.error)}" for w, end in ends.items()]
            parts += _answered(answers, ends, all_of_them=worker_ids is not None).values()
        return Evaluation.joined(parts)

    @contextlib.contextmanager
    def _cancelled_by_errors(
        self, request: EvaluationRequest, worker_ids: Sequence[int]
    ) -> Iterator[None]:
        try:
            yield
        except BaseException:  # such as Ctrl-C: the next batch is not to wait for the episodes
            for worker_id in worker_ids:
                self._pool.call(worker_id, WorkerService.cancel_evaluation, request.number)
            raise

    def _await(
        self,
        what: str,
        answers: Mapping[int, Future[Any]],
        known: Mapping[int, WorkerEnd],
        timeout_s: float,
        meanwhile: str = "",
    ) -> dict[int, WorkerEnd]:
        """Wait for answers; return how workers ended that were lost while they were asked.

        Raises:
            DeadlineError: some were not there in time; names the workers.
        """
        absent = _lost(answers)
        if late := missing(answers, timeout_s + _ANSWER_S):
            raise DeadlineError(
                f"workers {late} did not answer {what} within {timeout_s:g} s; timeout_s=... gives "
                f"longer, worker_ids=... leaves them out{meanwhile}"
            )
        return self._ends.since(known, _lost(answers) - absent, _ANSWER_S)


def _lost(answers: Mapping[int, Future[Any]]) -> set[int]:
    """Return the workers that are known not to answer, as they are gone."""
    return {w for w, a in answers.items() if a.done() and isinstance(a.exception(), WorkerLost)}


def _answered(
    answers: Mapping[int, Future[T]], ends: Mapping[int, WorkerEnd], *, all_of_them: bool
) -> dict[int, T]:
    """The workers' answers, by worker_id; without lost workers, unless ``all_of_them``."""
    answered: dict[int, T] = {}
    lost = _lost(answers)
    for worker_id, answer in answers.items():
        if worker_id not in lost:
            answered[worker_id] = answer.result()
        elif all_of_them:
            if worker_id in ends:
                raise copy.copy(ends[worker_id].error)  # the frames of a raise stay with an error
            answer.result()
    return answered
