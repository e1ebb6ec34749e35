"""Calls of workers for other things than rollouts: methods of envs, and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from distcollect.common.seeding import Stream, env_seed, shares
from distcollect.common.threads import Answers
from distcollect.config import EvaluationWorkers
from distcollect.errors import DeadlineError, WorkerLost
from distcollect.results import Evaluation
from distcollect.trainer.background_evaluation import Evaluators
from distcollect.trainer.pool import Pool
from distcollect.trainer.publisher import WorkerIds
from distcollect.transport.worker_service import EvaluationRequest, WorkerService

T = TypeVar("T")

# A worker that misses its deadline says so; this long for that to arrive.
_ANSWER_S = 5.0


class RemoteCalls:
    """The user's calls of workers.

    A worker that is lost meanwhile is left out, unless the user named the workers.
    """

    def __init__(self, pool: Pool, selected: Callable[[WorkerIds], Sequence[int]]) -> None:
        """Call through ``pool``; ``selected`` turns the user's ``worker_ids`` into ids."""
        self._pool = pool
        self._selected = selected

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        """Call a method of all envs, see :meth:`.DataCollectorBase.call`; by worker_id."""
        called = self._called(worker_ids)
        answers = self._pool.call_workers(
            WorkerService.call_envs, dict.fromkeys(called, (method, args, kwargs))
        )
        named = worker_ids is not None
        return _answers(f"call({method!r})", answers, timeout_s, all_of_them=named)

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
        while owed := num_episodes - sum(len(part.returns) for part in parts):
            selected = self._called(worker_ids)
            if not selected:
                raise WorkerLost("no worker is there to evaluate the policy")
            limit_s = max(0.0, deadline - time.monotonic())
            # If workers are lost, others play their episodes in the next round, with other seeds.
            first = len(parts) << 16
            requests = {
                w: EvaluationRequest(
                    share,
                    deterministic,
                    None if seed is None else env_seed(seed, first + w, stream=Stream.EVALUATION),
                    limit_s,
                )
                for w, share in zip(selected, shares(owed, len(selected)), strict=True)
                if share
            }
            answers = self._pool.call_workers(
                WorkerService.evaluate, {w: (request,) for w, request in requests.items()}
            )
            # The workers keep that deadline too, and their own errors say more.
            named = worker_ids is not None
            parts += _answers(
                "evaluate()", answers, limit_s + _ANSWER_S, all_of_them=named
            ).values()
        return Evaluation.joined(parts)


def _answers(
    what: str, answers: Answers[int, T], timeout_s: float, *, all_of_them: bool
) -> dict[int, T]:
    """The workers' answers, by worker_id; without lost workers, unless ``all_of_them``."""
    if late := answers.missing(timeout_s):
        raise DeadlineError(
            f"workers {late} did not answer {what} within {timeout_s:g} s; timeout_s=... gives "
            "longer, worker_ids=... leaves them out"
        )
    errors = answers.errors()
    return {
        worker_id: answer.result()
        for worker_id, answer in answers.by_key.items()
        if all_of_them or not isinstance(errors.get(worker_id), WorkerLost)
    }


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
