"""The pool while workers come and go: the shares of a batch, and a simulated run of all of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.pool_simulation import FLAT, FRAMES, Run

from distcollect.config import Staleness
from distcollect.errors import BatchTimeout
from distcollect.pool.worker_slots import BatchPlan

NUM_BATCHES = 1000
NUM_SYNC = NUM_BATCHES // 2  # these have several rollouts each
DROP_NONE = Staleness(0, mode="drop")


SYNC = BatchPlan(
    sync=True, num_rollouts=4, num_envs=1, num_steps=FRAMES, num_frames=NUM_SYNC * 4 * FRAMES
)


ASYNC = replace(SYNC, sync=False, num_rollouts=1, num_frames=NUM_BATCHES * FRAMES)


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize(("every", "to_all"), [(1, True), (2, True), (7, True), (1, False)])
def test_a_steady_habit_costs_no_rollout(every: int, to_all: bool, k: int) -> None:
    """Weights go to all workers or to some, after each batch or after several."""
    plan = replace(ASYNC, num_frames=None)
    run = Run(k, plan, staleness=Staleness(k), num_workers=random.Random(k).randint(1, 16))
    for number in range(1, 151):
        run.gather()
        if number % every == 0:
            workers = run.pool.worker_ids
            some = run.rng.sample(workers, run.rng.randint(1, len(workers)))
            run.pool.push(FLAT, workers if to_all else some)
        for _ in range(run.rng.choice([0, 0, 1, 5])):
            run.happen()
    assert "stale" not in run.pool.ledger.total.lost
    run.finish()


def script(run: Run, *steps: Callable[[], Any]) -> None:
    """While the user waits, let these steps happen in this order, and nothing else."""
    left = list(steps)

    def happen() -> bool:
        if left:
            left.pop(0)()
        return True

    run.happen = happen  # type: ignore[method-assign]


@pytest.mark.parametrize("inline", [0, 1])
def test_who_leaves_delivers_what_it_has_and_is_drained_once(inline: int) -> None:
    run = Run(0, replace(ASYNC, num_frames=None), num_workers=2, inline=0)
    first, second = run.present.values()
    script(run)
    run.deadline = -1.0
    for _ in range(2):
        with pytest.raises(BatchTimeout):
            run.pool.get(0)
    run.answer(first)
    run.answer(first)
    run.answer(second)
    run.answer(second)
    assert [a.fetched is None for a in second.request] == [True, True], "two others come first"
    run.inline = inline
    run.leave(second)
    for request in second.request:
        assert request.fetched is not None
        assert second.drained == (inline == 1) or request.number == 1
        if not inline:
            request.arrive()
    assert second.drained
    run.pool.leave(*second.key)


@pytest.mark.parametrize(
    ("seed", "plan", "staleness", "hands"),
    [
        (0, SYNC, None, 0),
        (1, replace(SYNC, waits_for_missing=True), None, 0),
        (2, replace(SYNC, num_frames=None, deadline_s=0.7, preemptive_threshold=0.6), None, 0),
        (3, replace(SYNC, waits_for_missing=True, num_rollouts=3, num_frames=None), DROP_NONE, 0),
        (4, ASYNC, None, 0),
        (5, replace(ASYNC, num_frames=None), None, 0),
        (36, ASYNC, Staleness(0), 0),
        (7, replace(ASYNC, num_frames=None), Staleness(2), 0),
        (8, ASYNC, Staleness(1, mode="drop"), 0),
        (9, ASYNC, None, 1.0),
        (10, ASYNC, Staleness(0), 0.5),
        (11, replace(ASYNC, num_frames=None), Staleness(1, mode="drop"), 0.5),
        (20, replace(ASYNC, in_turn=True), None, 0),
    ],
    ids=[
        "sync",
        "sync-waits",
        "sync-preempts",
        "sync-waits-drops",
        "async",
        "async-endless",
        "async-pace-0",
        "async-pace-2",
        "async-drop",
        "async-all-handed-over",
        "async-pace-0-half-handed-over",
        "async-drop-half-handed-over",
        "async-in-turn",
    ],
)
def test_churn(
    seed: int,
    plan: BatchPlan,
    staleness: Staleness | None,
    hands: float,
) -> None:
    run = Run(seed, plan, staleness=staleness, num_workers=4, faults=0.08, hands=hands)
    run.run(NUM_SYNC if plan.sync else NUM_BATCHES)
    run.finish()
    kinds = ["died collecting", "failed", "given up", "drained"]
    if hands < 1:
        kinds += ["died while fetched"]
    else:
        assert not run.counts["sent along"], "nothing may come here"
        assert not run.counts["died while fetched"], "nothing may come here"
    if hands:
        kinds += ["taken", "not taken", "died while kept"]
        kinds += ["sent along"] if hands < 1 else []
    for kind in kinds:
        assert run.counts[kind] > 3, f"no {kind}, {run.counts}: {run.about}"
