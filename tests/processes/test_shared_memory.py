"""Memory that a trainer maps instead of having it sent."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.loopback_pool import backend_of
from helpers.transports import TRANSPORTS

import distcollect as dc
from distcollect.common.shared_memory import allocate, map_segment


def test_memory_is_found_while_a_tensor_of_it_lives():
    memory, segment = allocate(64)
    part = memory[8:].view(torch.int64)
    del memory
    mapped = map_segment(segment)
    part[0] = 5
    another_file, another_process = replace(segment, name="other"), replace(segment, pid=1 << 23)
    for other in (another_file, another_process):
        with pytest.raises(OSError, match=r"No such file|no longer"):
            map_segment(other)
    del part
    with pytest.raises(OSError, match=r"No such file|no longer"):
        map_segment(segment)
    assert mapped[8] == 5  # who has mapped it keeps it


class Counting(gym.Env):
    """Each byte of an observation is the number of steps made."""

    SHAPE = (256, 256)
    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.steps = 0
        self.observation = np.zeros(self.SHAPE, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.steps += 1
        self.observation[:] = self.steps % 251
        return self.observation, {}

    def step(self, action):
        self.observation[:] = (self.observation + 1) % 251
        self.steps = int(self.observation[0, 0])
        return self.observation, 1.0, self.steps % 7 == 0, False, {}


@pytest.mark.parametrize("sync", [True, False])
def test_large_rollouts_of_workers_on_this_host(sync):
    """Check each byte; and a slab that is written again changes no earlier batch."""
    with dc.RPCDataCollector(
        Counting, None, frames_per_batch=40, envs_per_worker=2, num_workers=2, sync=sync
    ) as collector:
        peers = [slot.peer for slot in backend_of(collector).pool._core.slots]
        assert all(map(backend_of(collector).workers.transport.shares_memory, peers))
        kept = [collector.next() for _ in range(6)]
    for batch in kept:
        before, after = batch["observation"], batch["next", "observation"]
        assert (after == (before.long() + 1) % 251).all()
        assert (before == before[..., :1, :1]).all()


class OfNothing(Counting):
    """Has an entry without elements before others."""

    observation_space = gym.spaces.Dict(
        {"a": gym.spaces.Box(0, 1, (0,), np.uint8), "b": Counting.observation_space}
    )

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset()
        return {"a": observation[0, :0], "b": observation}, info

    def step(self, action):
        observation, *others = super().step(action)
        return ({"a": observation[0, :0], "b": observation}, *others)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_entry_without_elements_takes_no_other_entrys_place(transport):
    with dc.RPCDataCollector(
        OfNothing, None, frames_per_batch=20, num_workers=1, transport=transport
    ) as collector:
        batches = [collector.next() for _ in range(3)]
    for batch in batches:
        assert batch["a"].shape == (1, 20, 0)
        assert (batch["next", "b"] == (batch["b"].long() + 1) % 251).all()
        assert (batch["next", "reward"] == 1).all()
