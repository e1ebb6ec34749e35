"""Every frame of :class:`SyncDataCollector` is compared with what really happened in its envs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.judge_envs import (
    DRIFTING,
    MAY_REFUSE_CUTS,
    SINGLE_PROCESS_KINDS,
    SUBPROCESS_KINDS,
    NumberedMaker,
    act,
)
from helpers.judge_frames import FrameOracle, check_disjoint
from helpers.judge_settings import drawn
from helpers.judge_truth import Script
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc


@dataclass(frozen=True)
class Case:
    """What one run is made of."""

    num_rows: int
    num_steps: int
    lengths: tuple[int, ...]
    num_batches: int
    max_frames: int | None
    resets: bool
    form: str | None
    set_truncated: bool
    random_frames: int
    num_faults: int
    evaluates: bool

    def num_random_batches(self) -> int:
        """How many batches may have random actions."""
        if self.form == "whole" and self.random_frames:
            return self.num_batches
        return -(-self.random_frames // (self.num_rows * self.num_steps))

    def options(self) -> dict[str, Any]:
        given = {
            "frames_per_batch": self.num_rows * self.num_steps,
            "max_frames_per_traj": self.max_frames,
            "reset_at_each_iter": self.resets,
            "set_truncated": self.set_truncated,
            "init_random_frames": self.random_frames or None,
        }
        if self.form == "split":
            given["split_trajs"] = True
        elif self.form == "whole":
            given["trajs_per_batch"] = 2
        return given


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


CASES = st.builds(
    Case,
    num_rows=st.integers(1, 3),
    num_steps=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    num_batches=st.integers(1, 6),
    max_frames=st.none() | st.integers(1, 7),
    resets=st.booleans(),
    form=st.sampled_from([None, "split", "whole"]),
    set_truncated=st.booleans(),
    random_frames=st.sampled_from([0, 0, 5, 17]),
    num_faults=st.sampled_from([0, 0, 2]),
    evaluates=st.booleans(),
).filter(can_deliver)


def collect(kind: str, case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Script(folder, case.lengths, num_faults=case.num_faults)
        singles = case.num_rows if kind == "single" else 1
        maker = NumberedMaker(kind, script, case.num_rows)
        cuts = case.max_frames is not None or case.resets
        options = {**case.options(), "envs_per_worker": singles}
        options["pre_collect_hook"] = Limit()
        try:
            collector = dc.SyncDataCollector(maker, act, **options)
        except dc.ArgumentError as error:
            if cuts and kind in MAY_REFUSE_CUTS and "reset" in str(error):
                return
            raise
        oracle = FrameOracle(
            folder,
            case.num_steps,
            max_frames=case.max_frames,
            resets=case.resets,
            set_truncated=case.set_truncated,
            trajs=2 if case.form == "whole" else None,
            splits=case.form == "split",
            drifts=kind in DRIFTING,
            in_parallel=kind.startswith("async"),
            random_batches=case.num_random_batches(),
        )
        with collector:
            for _ in range(case.num_batches):
                batch = collector.next()
                oracle.check_faults(collector.stats())
                oracle.take(batch)
            if case.evaluates:
                oracle.check_evaluation(collector.evaluate(5), 5)
            all_delivered = case.form != "whole" and kind not in DRIFTING
            oracle.check_stats(collector.stats(), exact=all_delivered)
        oracle.check_kept()
        oracle.check_sums(collector.stats())


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


@drawn()
@given(case=CASES)
def test_each_frame_is_what_happened_in_a_vector_env_that_gives_tensors(case: Case) -> None:
    pytest.importorskip("array_api_compat", reason="gymnasium[array-api] is not installed")
    collect("gymnasium_torch-next", case)


def test_two_collectors_that_are_open_at_once_share_no_traj_ids() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        oracles = [FrameOracle(folder, 8) for folder in (one, other)]
        makers = [NumberedMaker("single", Script(folder, (3, 2))) for folder in (one, other)]
        with (
            dc.SyncDataCollector(makers[0], act, frames_per_batch=8) as first,
            dc.SyncDataCollector(makers[1], act, frames_per_batch=8) as second,
        ):
            for _ in range(3):
                oracles[0].take(first.next())
                oracles[1].take(second.next())
        check_disjoint(oracles)


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
