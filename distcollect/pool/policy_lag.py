"""Counts how many versions old each frame of a batch is, and masks frames that are too old."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from distcollect.config import Staleness
from distcollect.results import LagStats
from distcollect.rollout.header import Rollout


class VersionFrames(NamedTuple):
    """The frames of a rollout that have one version.

    Attributes:
        worker_id: the worker that stepped them.
        lag: how many newer versions had been sent to their worker.
        age: how many newer versions there were.
        num_frames: how many frames.
        is_masked: whether they are masked, as too old.
    """

    worker_id: int
    lag: int
    age: int
    num_frames: int
    is_masked: bool


def count_lags(
    batch: TensorDict,
    rollouts: Sequence[Rollout],
    lag_of: Callable[[int, int], int],
    age_of: Callable[[int], int],
    bound: Staleness | None = None,
) -> list[VersionFrames]:
    """Count the lags of a batch's frames, and mask the frames that are too old.

    Args:
        batch: ``[W * n, T]``; its mask is written to.
        rollouts: of the batch, in its order.
        lag_of: gives the lag of a frame, from its worker_id and policy_version.
        age_of: gives the age of a frame, from its policy_version.
        bound: frames that are older are masked; None: none are.

    Returns:
        The frames of all rollouts, by version.
    """

    def entries(name: str) -> Any:
        return batch["collector", name].reshape(len(rollouts), -1)

    found: list[VersionFrames] = []
    stale: list[tuple[int, int]] = []
    for index, rollout in enumerate(rollouts):
        worker_id, (lowest, highest) = rollout.header.worker_id, rollout.header.policy_version
        versions_of = [(lowest, rollout.header.num_frames)]
        if lowest != highest:
            versions_of = _versions(entries("policy_version")[index], entries("traj_ids")[index])
        for version, num_frames in versions_of:
            lag, age = lag_of(worker_id, version), age_of(version)
            is_masked = bound is not None and bound.slack(lag, age) < 0
            found.append(VersionFrames(worker_id, lag, age, num_frames, is_masked))
            if is_masked:
                stale.append((index, version))
    if stale:
        mask, versions = entries("mask"), entries("policy_version")
        for index, version in stale:
            mask[index][versions[index] == version] = False
        batch["collector", "mask"] = mask.reshape(batch.shape)
    return found


def stats_of(frames: Sequence[VersionFrames]) -> tuple[LagStats, LagStats]:
    """Return the summaries of lags and ages."""
    _, lags, ages, nums, _ = zip(*frames, strict=True)
    return LagStats.of(lags, nums), LagStats.of(ages, nums)


def _versions(versions: torch.Tensor, traj_ids: torch.Tensor) -> list[tuple[int, int]]:
    """A list of (policy_version, number of frames that have it), of one rollout."""
    is_real = traj_ids.numpy(force=True) >= 0
    values, counts = np.unique(versions.numpy(force=True)[is_real], return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))
