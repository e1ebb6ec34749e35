"""Frames of EnvPool are compared with the physics of CartPole and EnvPool's own count of steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.judge_settings import drawn
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase

import distcollect as dc

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
# Raised by Gymnasium when EnvPool makes its spaces.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
LONGEST = 12  # episodes of random actions mostly last longer, so that they are truncated


def make_pool(num_envs: int, batch_size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make_gymnasium(
            "CartPole-v1",
            num_envs=num_envs,
            batch_size=batch_size,
            num_threads=2,
            max_episode_steps=LONGEST,
            seed=list(range(num_envs)),
        )


def after_step(observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    """CartPole's physics, for observations ``[F, 4]``: what follows, in float64."""
    x, v, angle, spin = observation.astype(np.float64).T
    force = np.where(action == 1, 10.0, -10.0)
    cos, sin = np.cos(angle), np.sin(angle)
    temp = (force + 0.05 * spin**2 * sin) / 1.1
    angular = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    linear = temp - 0.05 * angular * cos / 1.1
    return np.stack(
        [x + 0.02 * v, v + 0.02 * linear, angle + 0.02 * spin, spin + 0.02 * angular], 1
    )


@dataclass(frozen=True)
class Case:
    """What one run is made of."""

    num_envs: int
    batch_size: int
    num_steps: int
    num_batches: int
    form: str | None
    max_frames: int | None
    resets: bool


CASES = st.builds(
    Case,
    num_envs=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    num_steps=st.integers(1, 20),
    num_batches=st.integers(1, 8),
    form=st.sampled_from([None, "split", "whole"]),
    max_frames=st.none() | st.integers(1, 9),
    resets=st.booleans(),
).filter(
    lambda case: case.batch_size <= case.num_envs and not (case.form == "whole" and case.resets)
)


def check_batch(batch: TensorDictBase, case: Case, seen: set[bytes]) -> None:
    form = case.form
    rows = batch.reshape(-1, batch.shape[-1])
    for index, row in enumerate(rows.unbind(0)):
        if form is not None:
            row = row[row["collector", "mask"]]  # noqa: PLW2901
        where = f"row {index}"
        observation, action = row["observation"].numpy(), row["action"].numpy()
        following = row["next", "observation"].numpy()
        np.testing.assert_allclose(following, after_step(observation, action), atol=1e-4)
        steps = row["elapsed_step"].flatten().numpy()
        after = row["next", "elapsed_step"].flatten().numpy()
        assert np.array_equal(after, steps + 1), f"{where}: steps {steps}, then {after}"
        done = row["next", "done"][:, 0].numpy()
        assert done[after == LONGEST].all(), where
        if case.resets and form is None:
            assert steps[0] == 0, f"{where}: a batch begins at step {steps[0]}, without a reset"
        ids = row["collector", "traj_ids"].numpy()
        if case.max_frames is not None:
            assert np.unique(ids, return_counts=True)[1].max() <= case.max_frames, where
        goes_on = ids[1:] == ids[:-1]
        assert not (goes_on & done[:-1]).any(), f"{where}: one traj_id for two episodes"
        assert np.array_equal(steps[1:][goes_on], after[:-1][goes_on]), f"{where}: a gap"
        assert np.array_equal(observation[1:][goes_on], following[:-1][goes_on]), where
        if form == "whole":
            assert steps[0] == 0, f"{where}: a whole trajectory begins at step {steps[0]}"
            assert done[-1], f"{where}: a whole trajectory doesn't end"
        for each in observation:
            assert each.tobytes() not in seen, f"{where}: a frame twice"
            seen.add(each.tobytes())


def collect(kind: Any, case: Case) -> None:
    options: dict[str, Any] = {
        "frames_per_batch": case.num_envs * case.num_steps,
        "info_keys": ["elapsed_step"],
        "split_trajs": case.form == "split",
        "trajs_per_batch": 2 if case.form == "whole" else None,
        "max_frames_per_traj": case.max_frames,
        "reset_at_each_iter": case.resets,
    }
    seen: set[bytes] = set()
    num_envs, batch_size = case.num_envs, case.batch_size
    with kind(lambda: make_pool(num_envs, batch_size), **options) as collector:
        for _ in range(case.num_batches):
            check_batch(collector.next(timeout_s=60), case, seen)
        episodes = collector.stats().episodes
        if episodes.count:
            # Its reward is 1 for each step: the return is the length, unless frames are missing.
            assert episodes.mean_return == pytest.approx(episodes.mean_length)
            # Random actions keep the pole up for eight steps at least.
            shortest = min(8, case.max_frames or 8)
            assert episodes.min_return >= shortest, "an episode that does not begin at a reset"


@drawn()
@given(case=CASES)
def test_each_frame_is_what_happened_in_the_pool(case: Case) -> None:
    collect(dc.SyncDataCollector, case)


@drawn(1 / 6)
@given(case=CASES)
def test_each_frame_of_a_worker_is_what_happened_in_the_pool(case: Case) -> None:
    collect(dc.aSyncDataCollector, case)
