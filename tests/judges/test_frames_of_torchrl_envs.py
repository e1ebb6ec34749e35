"""Every frame of TorchRL's envs is compared with what really happened in them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.judge_runs import Case, cases, judge
from helpers.judge_settings import drawn
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc

pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
from helpers.judge_torchrl_envs import TorchRLMaker, check_entries


def sized(case: Case) -> bool:
    """Return True unless it has both several envs and rows, or rows of a changing shape."""
    return not case.num_rows or (case.num_envs == 1 and case.kind != "dynamic")


CASES = cases(
    kind=st.sampled_from(["plain", "nested", "dynamic"]),
    num_envs=st.integers(1, 3),
    num_rows=st.sampled_from([0, 0, 2, 3]),
).filter(sized)


def collect(collector_class: Any, case: Case) -> None:
    judge(
        collector_class,
        case,
        lambda script: TorchRLMaker(case.kind, script, case.num_rows),
        check=lambda batch, _: check_entries(batch, case.kind),
    )


@drawn()
@given(case=CASES.filter(lambda case: not (case.form == "whole" and case.resets)))
def test_each_frame_is_what_happened_in_the_env(case: Case) -> None:
    collect(dc.SyncDataCollector, case)


@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_of_a_worker_is_what_happened_in_the_env(case: Case) -> None:
    collect(dc.aSyncDataCollector, case)


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("collector_class", [dc.SyncDataCollector, dc.aSyncDataCollector])
def test_an_entry_that_outgrows_its_spec_is_an_error_or_delivered_as_it_was(
    collector_class: Any, num_envs: int
) -> None:
    case = Case(8, (9, 5), 3, None, False, None, 0, False, kind="growing", num_envs=num_envs)
    try:
        collect(collector_class, case)
    except dc.DistCollectError as error:
        assert "shape" in str(error)  # noqa: PT017 - either is right
