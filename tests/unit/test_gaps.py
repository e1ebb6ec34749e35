"""Which trajectories lack frames that the user does not get."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from distcollect.collectors.gaps import Gaps
from distcollect.rollout.header import Header


def test_a_trajectory_that_begins_after_masked_frames_lacks_none() -> None:
    ids = torch.tensor([[5, 5, 6, 6], [7, 7, 7, 7]])
    frames = TensorDict({"collector": {"traj_ids": ids, "mask": ids.new_ones(2, 4).bool()}}, [2, 4])
    frames["collector", "mask"][:, :2] = False
    header = Header(0, 0, 1, 8, 4, 0, (0, 1))
    rests = Gaps(takes_masked=False).take(frames, [header], 2)
    first, second = frames["collector", "traj_ids"][:, 2].tolist()
    assert first == 6
    assert rests == {second}
