"""What workers are asked beside rollouts: of their envs, and how well the policy does."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from distcollect.common.seeding import Stream, env_seed, shares
from distcollect.common.threads import missing
from distcollect.config import EvaluationWorkers
from distcollect.errors import DeadlineError, WorkerLost
from distcollect.results import Evaluation
from distcollect.trainer.background_evaluation import Evaluators
from distcollect.trainer.pool import Pool
from distcollect.trainer.publisher import WorkerIds
from distcollect.transport.worker_service import EvaluationRequest, WorkerService

T = TypeVar("T")

# For what a worker has to say about its deadline to get here.
_ANSWER_S = 5.0


class RemoteCalls:
    """RemoteCalls of the user's; who is lost meanwhile is left out, unless it was named."""

    def __init__(self, pool: Pool, selected: Callable[[WorkerIds], Sequence[int]]) -> None:
        """Ask through ``pool`` whom ``selected`` makes of what the user names."""
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
        answers = {
            w: self._pool.call(w, WorkerService.call_envs, method, args, kwargs)
            for w in self._request(worker_ids)
        }
        named = worker_ids is not None
        return _answers(f"call({method!r})", answers, timeout_s, all_of_them=named)

    def _request(self, worker_ids: WorkerIds) -> Sequence[int]:
        """Those that are named; else all that are there."""
        return self._pool.present if worker_ids is None else self._selected(worker_ids)

    def evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        """Play so many episodes in all, see :meth:`.DataCollectorBase.evaluate`."""
        deadline = time.monotonic() + timeout_s
        parts: list[Evaluation] = []
        while owed := num_episodes - sum(len(part.returns) for part in parts):
            selected = self._request(worker_ids)
            if not selected:
                raise WorkerLost("no worker is there to evaluate the policy")
            limit_s = max(0.0, deadline - time.monotonic())
            # Again if workers were lost: others play what they owe.
            first = len(parts) << 16
            answers = {
                w: self._pool.call(
                    w,
                    WorkerService.evaluate,
                    EvaluationRequest(
                        share,
                        deterministic,
                        None
                        if seed is None
                        else env_seed(seed, first + w, stream=Stream.EVALUATION),
                        limit_s,
                    ),
                )
                for w, share in zip(selected, shares(owed, len(selected)), strict=True)
                if share
            }
            # They have that deadline too, and say more about it.
            named = worker_ids is not None
            parts += _answers(
                "evaluate()", answers, limit_s + _ANSWER_S, all_of_them=named
            ).values()
        return Evaluation.joined(parts)


def _answers(
    what: str, answers: Mapping[int, Future[T]], timeout_s: float, *, all_of_them: bool
) -> dict[int, T]:
    """What workers answered; those that were lost are left out, unless all have to be there."""
    if late := missing(answers, timeout_s):
        raise DeadlineError(
            f"workers {late} did not answer {what} within {timeout_s:g} s; timeout_s=... gives "
            "longer, worker_ids=... leaves them out"
        )
    return {
        worker_id: answer.result()
        for worker_id, answer in answers.items()
        if all_of_them or not isinstance(answer.exception(), WorkerLost)
    }


def evaluators(
    pool: Pool, plan: EvaluationWorkers | None, worker_ids: Collection[int]
) -> Evaluators | None:
    """Have these workers evaluate all versions as planned; None: nobody does."""
    if plan is None:
        return None
    request = Evaluators(partial(_ask_to_evaluate, pool, plan), worker_ids)
    pool.on_weights = request.has_weights
    return request


def _ask_to_evaluate(pool: Pool, plan: EvaluationWorkers, worker_id: int) -> Future[Evaluation]:
    request = EvaluationRequest(plan.num_episodes, plan.deterministic, None, plan.timeout_s)
    return pool.call(worker_id, WorkerService.evaluate, request)
