"""Every frame of :class:`SyncDataCollector` is compared with what really happened in its envs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import pytest
from helpers.judge_envs import SINGLE_PROCESS_KINDS, SUBPROCESS_KINDS, NumberedMaker, act
from helpers.judge_runs import Case, cases, judge, judge_ids_of_two
from helpers.judge_settings import drawn
from helpers.judge_truth import Script
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc


class Limit:
    """Ends a run that never delivers: a hook that raises when it is called too often."""

    def __init__(self, num_rollouts: int = 500) -> None:
        self._left = num_rollouts

    def __call__(self) -> None:
        self._left -= 1
        assert self._left, "no batch, after hundreds of rollouts"


def can_deliver(case: Case) -> bool:
    """Whether there can be whole trajectories: a reset in each rollout leaves only short ones."""
    if case.form == "whole" and case.set_truncated:
        return False  # refused
    longest = min(case.lengths) if case.max_frames is None else min(case.max_frames, *case.lengths)
    return not (case.form == "whole" and case.resets) or longest <= case.num_steps


CASES = cases(
    num_rows=st.integers(1, 3),
    set_truncated=st.booleans(),
    random_frames=st.sampled_from([0, 0, 5, 17]),
).filter(can_deliver)


def collect(kind: str, case: Case) -> None:
    case = replace(case, kind=kind)
    judge(
        dc.SyncDataCollector,
        case,
        lambda script: NumberedMaker(kind, script, case.num_rows),
        act,
        envs_per_worker=case.num_rows if kind == "single" else 1,
        pre_collect_hook=Limit(),
    )


@pytest.mark.parametrize("kind", SINGLE_PROCESS_KINDS)
@drawn()
@given(case=CASES)
def test_each_frame_is_what_happened_in_the_env(kind: str, case: Case) -> None:
    collect(kind, case)


@pytest.mark.parametrize("kind", SUBPROCESS_KINDS)
@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_is_what_happened_in_the_processes_of_an_async_vector_env(
    kind: str, case: Case
) -> None:
    collect(kind, case)


def test_two_collectors_that_are_open_at_once_share_no_traj_ids() -> None:
    classes = (dc.SyncDataCollector, dc.SyncDataCollector)
    judge_ids_of_two(classes, lambda script: NumberedMaker("single", script), act)


def test_a_wait_for_episodes_that_no_rollout_can_hold_ends_in_time() -> None:
    """Each rollout begins with a reset, and all episodes are longer: none can ever be whole."""
    limit = Limit(2000)
    options: dict[str, Any] = {"frames_per_batch": 4, "pre_collect_hook": limit}
    with tempfile.TemporaryDirectory() as folder:
        maker = NumberedMaker("single", Script(folder, (9,)))
        with (
            pytest.raises((dc.BatchTimeout, dc.ArgumentError)),
            dc.SyncDataCollector(
                maker, act, trajs_per_batch=1, reset_at_each_iter=True, **options
            ) as collector,
        ):
            collector.next(timeout_s=0.2)
