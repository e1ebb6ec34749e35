"""Every frame of the collectors with workers is compared with what really happened in the envs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from helpers.judge_envs import NumberedMaker, act
from helpers.judge_runs import Case, cases, judge, judge_ids_of_two
from helpers.judge_settings import drawn
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

CASES = cases(
    kind=st.sampled_from(
        ["single", "sync-next", "sync-same", "native-next", "native-disabled", "async-next"]
    ),
    num_rows=st.integers(1, 3),
    random_frames=st.sampled_from([0, 0, 17]),
    cat_results=st.sampled_from([0, "stack", -1]),
    preempts=st.booleans(),
)


@pytest.mark.parametrize("name", COLLECTORS)
@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_is_what_happened_in_the_env(name: str, case: Case) -> None:
    judge(
        COLLECTORS[name],
        case,
        lambda script: NumberedMaker(case.kind, script, case.num_rows),
        act,
        num_shares=2 if name in SYNC else 1,
        envs_per_worker=case.num_rows if case.kind == "single" else 1,
    )


def test_collectors_that_are_open_at_once_share_no_traj_ids() -> None:
    classes = (dc.SyncDataCollector, dc.aSyncDataCollector)
    judge_ids_of_two(classes, lambda script: NumberedMaker("single", script), act)
