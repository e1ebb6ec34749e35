"""Every frame of the collectors with workers is compared with what really happened in the envs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from helpers.judge_envs import DRIFTING, MAY_REFUSE_CUTS, NumberedMaker, act
from helpers.judge_frames import FrameOracle, check_disjoint
from helpers.judge_settings import drawn
from helpers.judge_truth import Script
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc

COLLECTORS: dict[str, Any] = {
    "aSync": dc.aSyncDataCollector,
    "MultiSync": partial(dc.MultiSyncDataCollector, num_workers=2),
    "MultiaSync": partial(dc.MultiaSyncDataCollector, num_workers=2),
    "RPC sync": partial(dc.RPCDataCollector, num_workers=2, sync=True),
    "RPC async": partial(dc.RPCDataCollector, num_workers=2, sync=False),
}
SYNC = {"MultiSync", "RPC sync"}


@dataclass(frozen=True)
class Case:
    """What one run is made of."""

    kind: str
    num_rows: int
    num_steps: int
    lengths: tuple[int, ...]
    num_batches: int
    max_frames: int | None
    resets: bool
    form: str | None
    random_frames: int
    num_faults: int
    evaluates: bool
    cat_results: int | str
    preempts: bool


CASES = st.builds(
    Case,
    kind=st.sampled_from(
        ["single", "sync-next", "sync-same", "native-next", "native-disabled", "async-next"]
    ),
    num_rows=st.integers(1, 3),
    num_steps=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    num_batches=st.integers(1, 8),
    max_frames=st.none() | st.integers(1, 7),
    resets=st.booleans(),
    form=st.sampled_from([None, "split", "whole"]),
    random_frames=st.sampled_from([0, 0, 17]),
    num_faults=st.sampled_from([0, 0, 2]),
    evaluates=st.booleans(),
    cat_results=st.sampled_from([0, "stack", -1]),
    preempts=st.booleans(),
)


def collect(name: str, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(folder, case.lengths, num_faults=case.num_faults)
        maker = NumberedMaker(case.kind, script, case.num_rows)
        is_sync = name in SYNC
        per_batch = case.num_rows * case.num_steps * (2 if is_sync else 1)
        # Workers with resets may never have a whole episode.
        form = None if case.form == "whole" and case.resets else case.form
        options: dict[str, Any] = {
            "frames_per_batch": per_batch,
            "envs_per_worker": case.num_rows if case.kind == "single" else 1,
            "max_frames_per_traj": case.max_frames,
            "reset_at_each_iter": case.resets,
            "init_random_frames": case.random_frames or None,
            "split_trajs": form == "split",
            "trajs_per_batch": 2 if form == "whole" else None,
        }
        if is_sync and form is None:
            options["cat_results"] = case.cat_results
            # Joined along time, a preempted rollout leaves no padding that shows where it ends.
            preempts = case.preempts and case.cat_results != -1
            options["preemptive_threshold"] = 0.5 if preempts else None
        try:
            collector = COLLECTORS[name](maker, act, **options)
        except dc.ArgumentError as error:
            cuts = case.max_frames is not None or case.resets
            if cuts and case.kind in MAY_REFUSE_CUTS and "reset" in str(error):
                return
            raise
        oracle = FrameOracle(
            folder,
            case.num_steps,
            max_frames=case.max_frames,
            resets=case.resets,
            trajs=2 if form == "whole" else None,
            splits=form == "split",
            drifts=case.kind in DRIFTING and is_sync,
            in_parallel=case.kind.startswith("async"),
            random_batches=case.num_batches if case.random_frames else 0,
        )
        with collector:
            for _ in range(case.num_batches):
                batch = collector.next(timeout_s=60)
                oracle.check_faults(collector.stats())
                oracle.take(batch)
            if case.evaluates:
                oracle.check_evaluation(collector.evaluate(5), 5)
            oracle.check_stats(collector.stats(), exact=False)
        oracle.check_kept()
        oracle.check_ledger(collector.ledger, ended=True)


@pytest.mark.parametrize("name", COLLECTORS)
@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_is_what_happened_in_the_env(name: str, case: Case) -> None:
    collect(name, case)


def test_collectors_that_are_open_at_once_share_no_traj_ids() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        oracles = [FrameOracle(folder, 8) for folder in (one, other)]
        makers = [NumberedMaker("single", Script(folder, (3, 2))) for folder in (one, other)]
        with (
            dc.SyncDataCollector(makers[0], act, frames_per_batch=8) as first,
            dc.aSyncDataCollector(makers[1], act, frames_per_batch=8) as second,
        ):
            for _ in range(3):
                oracles[0].take(first.next())
                oracles[1].take(second.next())
        check_disjoint(oracles)
