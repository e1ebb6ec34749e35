"""Calls of workers for other things than rollouts: methods of envs, and evaluation."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from distcollect.common.replies import missing
from distcollect.common.seeding import Stream, env_seed, shares
from distcollect.config import EvaluationWorkers
from distcollect.errors import ArgumentTypeError, DeadlineError, WorkerLost
from distcollect.pool.background_evaluation import Evaluators
from distcollect.pool.pool import Pool
from distcollect.pool.publisher import WorkerIds
from distcollect.results import Evaluation
from distcollect.roster.process import message_of
from distcollect.roster.worker_ends import WorkerEnd, WorkerEnds
from distcollect.transport.worker_service import EvaluationRequest, WorkerService

T = TypeVar("T")

# A worker that misses its deadline says so, or is ended; this long for that to arrive.
_ANSWER_S = 5.0


class RemoteCalls:
    """The user's calls of workers.

    A worker that is lost meanwhile is left out, unless the user named the workers.
    """

    def __init__(
        self, pool: Pool, selected: Callable[[WorkerIds], Sequence[int]], ends: WorkerEnds
    ) -> None:
        """Call workers.

        Args:
            pool: calls them.
            selected: turns the user's ``worker_ids`` into ids.
            ends: how lost workers ended.
        """
        self._pool = pool
        self._selected = selected
        self._ends = ends

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        """Call a method of all envs, see :meth:`.DataCollectorBase.call`; by worker_id."""
        _check_can_be_pickled(method, args, kwargs)
        known = self._ends.known()
        called = self._called(worker_ids)
        answers = {
            w: self._pool.call(w, WorkerService.call_envs, method, args, kwargs, timeout_s)
            for w in called
        }
        absent = _lost(answers)
        what = f"call({method!r})"
        # A worker whose envs take longer than timeout_s is ended, and how it ended says more.
        _await(what, answers, timeout_s, _ANSWER_S)
        ends = self._ends.since(known, _lost(answers) - absent, _ANSWER_S)
        for worker_id, end in ends.items():
            if end.is_hang:
                raise DeadlineError(
                    f"worker {worker_id} did not answer {what} within {timeout_s:g} s, and is "
                    f"replaced: {message_of(end.error)}. If the call may take longer, give a "
                    "longer timeout_s"
                )
        return _answered(answers, ends, all_of_them=worker_ids is not None)

    def _called(self, worker_ids: WorkerIds) -> Sequence[int]:
        """The workers that the user named; if none, all that are there."""
        return self._pool.present if worker_ids is None else self._selected(worker_ids)

    def evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        """Play this many episodes in all, see :meth:`.DataCollectorBase.evaluate`."""
        deadline = time.monotonic() + timeout_s
        parts: list[Evaluation] = []
        known = self._ends.known()
        lost: list[str] = []  # how workers ended that were evaluating
        while owed := num_episodes - sum(len(part.returns) for part in parts):
            selected = self._called(worker_ids)
            if not (selected or lost):  # all are being replaced, for other reasons than this
                selected = self._pool.await_present(deadline - time.monotonic())
            if not selected:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"evaluate() had no worker for {timeout_s:g} s, as all are being replaced; "
                        f"timeout_s=... gives longer{_meanwhile(lost)}"
                    )
                raise WorkerLost(f"no worker is there to evaluate the policy{_meanwhile(lost)}")
            limit_s = max(0.0, deadline - time.monotonic())
            # If workers are lost, others play their episodes in the next round, with other seeds.
            first = len(parts) << 16
            answers = {}
            for w, share in zip(selected, shares(owed, len(selected)), strict=True):
                if share:
                    own = _own_seed(seed, first + w)
                    request = EvaluationRequest(share, deterministic, own, limit_s)
                    answers[w] = self._pool.call(w, WorkerService.evaluate, request)
            absent = _lost(answers)
            # The workers keep that deadline too, and their own errors say more.
            _await("evaluate()", answers, limit_s, _ANSWER_S, _meanwhile(lost))
            ends = self._ends.since(known, _lost(answers) - absent, _ANSWER_S)
            known |= ends
            lost += [f"worker {w}: {message_of(end.error)}" for w, end in ends.items()]
            parts += _answered(answers, ends, all_of_them=worker_ids is not None).values()
        return Evaluation.joined(parts)


def _own_seed(seed: int | None, number: int) -> int | None:
    return None if seed is None else env_seed(seed, number, stream=Stream.EVALUATION)


def _check_can_be_pickled(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentTypeError unless these arguments of a method can be sent."""
    try:
        pickle.dumps((args, kwargs))
    except Exception as error:
        raise ArgumentTypeError(
            f"call({method!r}): its arguments can't be pickled ({type(error).__name__}: {error}), "
            "so they can't be sent to the workers; pass numbers, arrays or tensors"
        ) from error


def _await(
    what: str,
    answers: Mapping[int, Future[Any]],
    timeout_s: float,
    grace_s: float,
    meanwhile: str = "",
) -> None:
    """Wait for answers.

    Raises:
        DeadlineError: some were not there after ``timeout_s`` and ``grace_s``; names the workers.
    """
    if late := missing(answers, timeout_s + grace_s):
        raise DeadlineError(
            f"workers {late} did not answer {what} within {timeout_s:g} s; timeout_s=... gives "
            f"longer, worker_ids=... leaves them out{meanwhile}"
        )


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


def _meanwhile(lost: Sequence[str]) -> str:
    return f"; lost meanwhile: {'; '.join(lost)}" if lost else ""


def evaluators(
    pool: Pool, plan: EvaluationWorkers | None, worker_ids: Collection[int]
) -> Evaluators | None:
    """Have these workers evaluate the versions that they get; None without a plan."""
    if plan is None:
        return None
    evaluators = Evaluators(partial(_evaluate, pool, plan), worker_ids)
    pool.on_weights = evaluators.has_weights
    return evaluators


def _evaluate(pool: Pool, plan: EvaluationWorkers, worker_id: int) -> Future[Evaluation]:
    request = EvaluationRequest(plan.num_episodes, plan.deterministic, None, plan.timeout_s)
    return pool.call(worker_id, WorkerService.evaluate, request)
