"""Every frame of an env with several agents is compared with what really happened to each agent."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.judge_frames import FrameOracle
from helpers.judge_settings import drawn
from helpers.judge_truth import Script
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc

pytest.importorskip("pettingzoo", reason="the pettingzoo extra is not installed")
from helpers.judge_agents import AgentsMaker, as_one_agent, check_agents


@dataclass(frozen=True)
class Case:
    """What one run is made of."""

    num_envs: int
    num_steps: int
    lengths: tuple[int, ...]
    num_batches: int
    max_frames: int | None
    resets: bool
    form: str | None
    num_faults: int
    evaluates: bool


CASES = st.builds(
    Case,
    num_envs=st.integers(1, 3),
    num_steps=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    num_batches=st.integers(1, 5),
    max_frames=st.none() | st.integers(1, 7),
    resets=st.booleans(),
    form=st.sampled_from([None, "split", "whole"]),
    num_faults=st.sampled_from([0, 0, 2]),
    evaluates=st.booleans(),
)


def collect(kind: Any, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(folder, case.lengths, num_faults=case.num_faults)
        form = None if case.form == "whole" and case.resets else case.form
        options: dict[str, Any] = {
            "frames_per_batch": case.num_envs * case.num_steps,
            "envs_per_worker": case.num_envs,
            "max_frames_per_traj": case.max_frames,
            "reset_at_each_iter": case.resets,
            "split_trajs": form == "split",
            "trajs_per_batch": 2 if form == "whole" else None,
        }
        oracle = FrameOracle(
            folder,
            case.num_steps,
            max_frames=case.max_frames,
            resets=case.resets,
            trajs=2 if form == "whole" else None,
            splits=form == "split",
            acts=False,
        )
        with kind(AgentsMaker(script), **options) as collector:
            for _ in range(case.num_batches):
                batch = collector.next(timeout_s=60)
                oracle.take(as_one_agent(batch))
                check_agents(batch, script)
            if case.evaluates:
                oracle.check_evaluation(collector.evaluate(5), 5)
            exact = kind is dc.SyncDataCollector and form != "whole"
            oracle.check_stats(collector.stats(), exact=exact)
        if kind is dc.SyncDataCollector:
            oracle.check_sums(collector.stats())
        else:
            oracle.check_ledger(collector.ledger, ended=True)


@drawn()
@given(case=CASES)
def test_each_frame_is_what_happened_to_each_agent(case: Case) -> None:
    collect(dc.SyncDataCollector, case)


@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_of_a_worker_is_what_happened_to_each_agent(case: Case) -> None:
    collect(dc.aSyncDataCollector, case)
