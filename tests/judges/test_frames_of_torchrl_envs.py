"""Every frame of TorchRL's envs is compared with what really happened in them."""

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

pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
from helpers.judge_torchrl_envs import TorchRLMaker, check_entries


@dataclass(frozen=True)
class Case:
    """What one run is made of."""

    kind: str
    num_envs: int
    num_rows: int
    num_steps: int
    lengths: tuple[int, ...]
    num_batches: int
    max_frames: int | None
    resets: bool
    form: str | None
    num_faults: int
    evaluates: bool


EXTRA = {"kind": ["plain", "nested", "dynamic"], "num_rows": [0, 0, 2, 3]}
CASES = st.builds(
    Case,
    kind=st.sampled_from(EXTRA["kind"]),
    num_envs=st.integers(1, 3),
    num_rows=st.sampled_from(EXTRA["num_rows"]),
    num_steps=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    num_batches=st.integers(1, 5),
    max_frames=st.none() | st.integers(1, 7),
    resets=st.booleans(),
    form=st.sampled_from([None, "split", "whole"]),
    num_faults=st.sampled_from([0, 0, 2]),
    evaluates=st.booleans(),
)


def collect(collector_class: Any, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(folder, case.lengths, num_faults=case.num_faults)
        num_envs = 1 if case.num_rows else case.num_envs
        # One length for all: rows of a changing shape are of one env each.
        num_rows = 0 if case.kind in ("dynamic", "growing") else case.num_rows
        form = None if case.form == "whole" and case.resets else case.form
        options: dict[str, Any] = {
            "frames_per_batch": num_envs * max(1, num_rows) * case.num_steps,
            "envs_per_worker": num_envs,
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
        maker = TorchRLMaker(case.kind, script, num_rows)
        with collector_class(maker, **options) as collector:
            for _ in range(case.num_batches):
                batch = collector.next(timeout_s=60)
                oracle.check_faults(collector.stats())
                oracle.take(batch)
                check_entries(batch, case.kind)
            if case.evaluates:
                oracle.check_evaluation(collector.evaluate(5), 5)
            exact = collector_class is dc.SyncDataCollector and form != "whole"
            oracle.check_stats(collector.stats(), exact=exact)
        if collector_class is dc.SyncDataCollector:
            oracle.check_sums(collector.stats())
        else:
            oracle.check_ledger(collector.ledger, ended=True)


@drawn()
@given(case=CASES)
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
    case = Case("growing", num_envs, 0, 8, (9, 5), 3, None, False, None, 0, False)
    try:
        collect(collector_class, case)
    except dc.DistCollectError as error:
        assert "shape" in str(error)  # noqa: PT017 - either is right
