"""What a batch says of where its frames come from: the entries under "collector"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import FAULTED, MASK, POLICY_VERSION, TRAJ_IDS
from distcollect.rollout.spaces import Key


def collector_entries(
    rollouts: Sequence[Rollout], flat: dict[Key, torch.Tensor], *, mask: bool
) -> dict[str, torch.Tensor]:
    """Return the entries under "collector" of rollouts that were joined.

    Raises:
        ValueError: there is padding, and ``mask`` is False.
    """
    traj_ids = flat[TRAJ_IDS]
    num_frames = sum(rollout.header.num_frames for rollout in rollouts)
    if num_frames < traj_ids.numel() and not mask:
        raise ValueError("a rollout is padded, so its batch needs a mask")
    ids = [rollout.header.worker_id for rollout in rollouts]
    worker_ids = np.array(ids).repeat(traj_ids.numel() // len(ids)).reshape(traj_ids.shape)
    collector = {
        "traj_ids": traj_ids,
        "policy_version": flat[POLICY_VERSION],
        "faulted": flat[FAULTED],
        "worker_id": torch.from_numpy(worker_ids),
    }
    if mask:
        collector[MASK[-1]] = traj_ids >= 0
    return collector
