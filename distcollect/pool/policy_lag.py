"""Counts how many versions old each frame of a batch is, and masks frames that are too old."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from distcollect.rollout.header import Rollout


def count_lags(
    batch: TensorDict,
    rollouts: Sequence[Rollout],
    lag_of: Callable[[int, int], int],
    mask_above: int | None = None,
) -> list[list[tuple[int, int]]]:
    """Count the lags of a batch's frames, and mask the frames that lag too much.

    Args:
        batch: ``[W * n, T]``; its mask is written to.
        rollouts: of the batch, in its order.
        lag_of: gives the lag of a frame, from its worker_id and policy_version.
        mask_above: frames that lag more are masked; None: none are.

    Returns:
        For each rollout a list of (lag, number of frames that have it).
    """
    versions = batch["collector", "policy_version"]
    by_rollout = versions.reshape(len(rollouts), -1)
    traj_ids = batch["collector", "traj_ids"].reshape(len(rollouts), -1)
    lags: list[list[tuple[int, int]]] = []
    stale: list[tuple[int, int]] = []
    for index, rollout in enumerate(rollouts):
        counts = []
        lowest, highest = rollout.header.policy_version
        versions_of = [(lowest, rollout.header.num_frames)]
        if lowest != highest:
            versions_of = _versions(by_rollout[index], traj_ids[index])
        for version, num_frames in versions_of:
            lag = lag_of(rollout.header.worker_id, version)
            counts.append((lag, num_frames))
            if mask_above is not None and lag > mask_above:
                stale.append((index, version))
        lags.append(counts)
    if mask_above is not None:
        fresh = torch.ones_like(by_rollout, dtype=torch.bool)
        for index, version in stale:
            fresh[index][by_rollout[index] == version] = False
        batch["collector", "mask"] &= fresh.reshape(versions.shape)
    return lags


def _versions(versions: torch.Tensor, traj_ids: torch.Tensor) -> list[tuple[int, int]]:
    """A list of (policy_version, number of frames that have it), of one rollout."""
    is_real = traj_ids >= 0
    values, counts = np.unique(versions[is_real].numpy(force=True), return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))
