"""TorchRL's replay buffers of every storage, with batches of every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer

import distcollect as dc

pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
from torchrl.data import (
    LazyTensorStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

T = 4


def made(ndim: int, kind: Any = TensorDictReplayBuffer) -> Any:
    return kind(storage=LazyTensorStorage(1000, ndim=ndim), batch_size=8)


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("extend_buffer", [True, False])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_rows_are_envs(num_envs: int, extend_buffer: bool, in_process: bool) -> None:
    """Column i of the storage has the steps of env i in their order."""
    buffer = made(ndim=2)
    kwargs: dict[str, Any] = {
        "envs_per_worker": num_envs,
        "frames_per_batch": num_envs * T,
        "replay_buffer": buffer,
        "extend_buffer": extend_buffer,
    }
    if in_process:
        collector: Any = dc.SyncDataCollector(CountingMaker(), **kwargs)
    else:
        collector = loopback_collector(CountingMaker(), num_workers=1, sync=True, **kwargs)
    with collector:
        for _ in range(3):
            collector.next()
    stored = buffer[:] if num_envs == 1 else buffer.storage[:]
    stored = stored.reshape(3 * T, num_envs)
    assert len(buffer) == 3 * T * num_envs
    ids = stored["collector", "traj_ids"]
    goes_on = ids[1:] == ids[:-1]
    assert goes_on.any()
    assert torch.equal(
        stored["next", "observation"][:-1][goes_on], stored["observation"][1:][goes_on]
    )


def test_torchrls_priorities() -> None:
    settings = {"alpha": 0.7, "beta": 0.5, "batch_size": 8}
    try:
        buffer = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(100), **settings)
    except RuntimeError as error:  # the page "Training" says which versions fit
        pytest.skip(f"TorchRL's binary does not load with torch {torch.__version__}: {error}")
    collector = loopback_collector(
        CountingMaker(), num_workers=1, frames_per_batch=T, replay_buffer=buffer
    )
    with collector:
        for _ in range(3):
            collector.next()
        sample = buffer.sample()
        sample["td_error"] = 1.0 + (sample["index"] == 5)
        buffer.update_tensordict_priority(sample)
        assert len(buffer) == 3 * T
        assert sample["priority_weight"].shape == (8,)


MASKING: dict[str, dict[str, Any]] = {
    "split_trajs": {"split_trajs": True},
    "trajs_per_batch": {"trajs_per_batch": 1},
    "preemptive_threshold": {"sync": True, "preemptive_threshold": 0.5},
    "batch_deadline_s": {"sync": True, "batch_deadline_s": 1.0},
    r"Staleness\(.*mode='mask', max_policy_age=None\)": {"staleness": dc.Staleness(0, mode="mask")},
}


@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda: {"replay_buffer": made(ndim=2)}, "its storage has ndim=2, so .* and {} "),
        (
            lambda: {"replay_buffer": made(ndim=1), "extend_buffer": False},
            "extend_buffer=False adds single steps to the replay buffer, and {} ",
        ),
    ],
)
def test_frames_that_are_left_out_and_whole_steps(
    buffer: Callable[[], dict[str, Any]],
    message: str,
    name: str,
    started: Callable[[], list[str]],
) -> None:
    """It is refused before any process is started; it failed, or was ignored, in the middle."""
    with pytest.raises(dc.ArgumentError, match=message.format(name)):
        dc.RPCDataCollector(
            "CartPole-v1", frames_per_batch=8, num_workers=2, **buffer(), **MASKING[name]
        )
    assert started() == []


def test_a_buffer_of_the_users_that_keeps_frames_in_an_array() -> None:
    """Its array has dimensions, but it is given frames ``[F]`` nevertheless."""

    ring = KeepingBuffer()
    ring.storage = torch.zeros(100, 4)
    with dc.SyncDataCollector(
        CountingMaker(), envs_per_worker=2, frames_per_batch=2 * T, replay_buffer=ring
    ) as collector:
        collector.next()
    assert ring.shapes == [(2 * T,)]
