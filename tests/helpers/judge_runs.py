"""One run of a collector whose every frame is compared with what really happened in its envs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.judge_envs import DRIFTING, MAY_REFUSE_CUTS
from helpers.judge_frames import FrameOracle, check_disjoint
from helpers.judge_truth import Script
from hypothesis import strategies as st
from tensordict import TensorDictBase

import distcollect as dc

_TRAJS = 2  # trajs_per_batch


@dataclass(frozen=True)
class Case:
    """What one run is made of; the options have the collectors' names.

    Attributes:
        form: "split" for ``split_trajs``, "whole" for ``trajs_per_batch``.
        num_envs: envs of each worker.
        num_rows: rows of each env; 0: it has no rows.
    """

    num_steps: int
    lengths: tuple[int, ...]
    num_batches: int
    max_frames: int | None
    resets: bool
    form: str | None
    num_faults: int
    evaluates: bool
    kind: str = "single"
    num_envs: int = 1
    num_rows: int = 0
    set_truncated: bool = False
    random_frames: int = 0
    cat_results: int | str = 0
    preempts: bool = False

    @property
    def all_rows(self) -> int:
        """Number of rows of one rollout."""
        return self.num_envs * max(1, self.num_rows)


def cases(**drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    """Draw runs; ``drawn`` are the fields beside those that all runs have."""
    return st.builds(
        Case,
        num_steps=st.integers(1, 11),
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
        num_batches=st.integers(1, 6),
        max_frames=st.none() | st.integers(1, 7),
        resets=st.booleans(),
        form=st.sampled_from([None, "split", "whole"]),
        num_faults=st.sampled_from([0, 0, 2]),
        evaluates=st.booleans(),
        **drawn,
    )


def judge(
    collector_class: Callable[..., Any],
    case: Case,
    make_maker: Callable[[Script], Any],
    *policy: Any,
    view: Callable[[TensorDictBase], TensorDictBase] = lambda batch: batch,
    check: Callable[[TensorDictBase, Script], None] = lambda batch, script: None,
    num_shares: int = 1,
    **more_options: Any,
) -> None:
    """Collect, and compare all that is delivered with the truth.

    Args:
        collector_class: the collector to judge.
        case: what the run is made of.
        make_maker: makes the maker of the envs.
        policy: none for random actions.
        view: gives the batch in the form that the oracle knows.
        check: more to be compared.
        num_shares: rollouts in a batch.
        more_options: of the collector.
    """
    is_local = collector_class is dc.SyncDataCollector
    # Workers with resets may never have a whole episode.
    form = None if case.form == "whole" and case.resets and not is_local else case.form
    options: dict[str, Any] = {
        "frames_per_batch": case.all_rows * case.num_steps * num_shares,
        "envs_per_worker": case.num_envs,
        "max_frames_per_traj": case.max_frames,
        "reset_at_each_iter": case.resets,
        "set_truncated": case.set_truncated,
        "init_random_frames": case.random_frames or None,
        "split_trajs": form == "split",
        "trajs_per_batch": _TRAJS if form == "whole" else None,
        **more_options,
    }
    if num_shares > 1 and form is None:
        options["cat_results"] = case.cat_results
        # Joined along time, a preempted rollout leaves no padding that shows where it ends.
        preempts = case.preempts and case.cat_results != -1
        options["preemptive_threshold"] = 0.5 if preempts else None
    is_delayed = form == "whole" or not is_local
    random_batches = -(-case.random_frames // options["frames_per_batch"])
    with tempfile.TemporaryDirectory() as folder:
        oracle = FrameOracle(
            folder,
            case.num_steps,
            max_frames=case.max_frames,
            resets=case.resets,
            set_truncated=case.set_truncated,
            trajs=options["trajs_per_batch"],
            splits=form == "split",
            drifts=case.kind in DRIFTING and (is_local or num_shares > 1),
            in_parallel=case.kind.startswith("async"),
            acts=bool(policy),
            random_batches=case.num_batches
            if case.random_frames and is_delayed
            else random_batches,
        )
        script = Script(folder, case.lengths, num_faults=case.num_faults)
        try:
            collector = collector_class(make_maker(script), *policy, **options)
        except dc.ArgumentError as error:
            cuts = case.max_frames is not None or case.resets
            if cuts and case.kind in MAY_REFUSE_CUTS and "reset" in str(error):
                return
            raise
        with collector:
            for _ in range(case.num_batches):
                batch = collector.next(timeout_s=60)
                oracle.check_faults(collector.stats())
                oracle.take(view(batch))
                check(batch, script)
            if case.evaluates:
                oracle.check_evaluation(collector.evaluate(5), 5)
            oracle.check_stats(collector.stats(), exact=not is_delayed and not oracle.drifts)
        oracle.check_kept()
        if is_local:
            oracle.check_sums(collector.stats())
        else:
            oracle.check_ledger(collector.ledger)


def judge_ids_of_two(
    classes: tuple[Callable[..., Any], Callable[..., Any]],
    make_maker: Callable[[Script], Any],
    policy: Any,
) -> None:
    """Two collectors that are open at once share no ``traj_ids``."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        oracles = [FrameOracle(folder, 8) for folder in (one, other)]
        makers = [make_maker(Script(folder, (3, 2))) for folder in (one, other)]
        with (
            classes[0](makers[0], policy, frames_per_batch=8) as first,
            classes[1](makers[1], policy, frames_per_batch=8) as second,
        ):
            for _ in range(3):
                oracles[0].take(first.next())
                oracles[1].take(second.next())
        check_disjoint(oracles)
