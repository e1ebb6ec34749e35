"""Every frame of an env with several agents is compared with what really happened to each agent."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.judge_runs import Case, cases, judge
from helpers.judge_settings import drawn
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc

pytest.importorskip("pettingzoo", reason="the pettingzoo extra is not installed")
from helpers.judge_agents import AgentsMaker, as_one_agent, check_agents

CASES = cases(num_envs=st.integers(1, 3))


def collect(collector_class: Any, case: Case) -> None:
    judge(collector_class, case, AgentsMaker, view=as_one_agent, check=check_agents)


@drawn()
@given(case=CASES.filter(lambda case: not (case.form == "whole" and case.resets)))
def test_each_frame_is_what_happened_to_each_agent(case: Case) -> None:
    collect(dc.SyncDataCollector, case)


@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_of_a_worker_is_what_happened_to_each_agent(case: Case) -> None:
    collect(dc.aSyncDataCollector, case)
