"""Replay buffers that are sampled by priority, while a thread adds frames to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import Buffer
from tensordict import TensorDict

import distcollect as dc

CAPACITY = 64


class Ring:
    """The smallest class that works with priorities."""

    def __init__(self, capacity: int) -> None:
        self.frames: TensorDict | None = None
        self.capacity, self.added = capacity, 0

    def extend(self, frames: TensorDict) -> torch.Tensor:
        index = (self.added + torch.arange(len(frames))) % self.capacity
        if self.frames is None:
            self.frames = frames[:1].expand(self.capacity).clone()
        self.frames[index] = frames
        self.added += len(frames)
        return index

    def empty(self) -> None:
        self.added = 0

    def __getitem__(self, index: torch.Tensor) -> TensorDict:
        assert self.frames is not None
        return self.frames[index]


def torchrls(capacity: int) -> Any:
    data = pytest.importorskip("torchrl.data", reason="the torchrl extra is not installed")
    return data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(capacity), batch_size=16)


BUFFERS = pytest.mark.parametrize("buffer_of", [Ring, torchrls])


def frames(*numbers: int) -> TensorDict:
    return TensorDict({"number": torch.tensor(numbers)}, batch_size=len(numbers))


def shares(buffer: Any, num: int) -> list[float]:
    """The share of each of the numbers below ``num`` among sampled frames."""
    drawn = buffer.sample(100_000)["number"]
    return (torch.bincount(drawn, minlength=num) / len(drawn)).tolist()


def give(buffer: Any, priority_of: Callable[[torch.Tensor], torch.Tensor]) -> int:
    sample = buffer.sample(1000)
    sample["td_error"] = priority_of(sample["number"])[:, None]
    return buffer.update_tensordict_priority(sample)


@BUFFERS
def test_frames_are_sampled_by_priority(buffer_of: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    buffer = dc.Prioritized(buffer_of(8), alpha=0.5, beta=1.0)
    with pytest.raises(dc.CollectorStateError, match="no frames to sample"):
        buffer.sample(1)
    buffer.extend(frames(0, 1, 2))
    assert shares(buffer, 3) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert give(buffer, lambda number: -((number + 1.0) ** 4)) == 1000
    assert shares(buffer, 3) == pytest.approx([1 / 14, 4 / 14, 9 / 14], abs=0.01)
    sample = buffer.sample(100)
    expected = 1 / (sample["number"] + 1.0) ** 2
    assert torch.allclose(sample["priority_weight"], expected, rtol=1e-4)
    # New frames have the highest priority that there was.
    buffer.extend(frames(3))
    assert shares(buffer, 4)[3] == pytest.approx(9 / 23, abs=0.01)
    with pytest.raises(dc.ArgumentError, match="'td_error' has a NaN"):
        give(buffer, lambda number: number / 0)

    if hasattr(buffer, "state_dict"):
        dc.Checkpoint(tmp_path / "c.pt", buffer=buffer).save()
        buffer = dc.Prioritized(buffer_of(8), alpha=0.5, beta=1.0)
        dc.Checkpoint(tmp_path / "c.pt", buffer=buffer).load()
        assert shares(buffer, 4)[3] == pytest.approx(9 / 23, abs=0.01)


def test_attributes_are_set_where_they_are_read() -> None:
    inner: Any = Ring(8)
    inner.label = "first"
    buffer = dc.Prioritized(inner, beta=0.0)
    limited: Any = dc.RateLimited(buffer, 1.0, slack=1e6)
    limited.extend(frames(0, 1))
    give(limited, lambda number: number + 1.0)
    assert (limited.sample(100)["priority_weight"] == 1).all()
    limited.beta, limited.label = 1.0, "second"
    assert (buffer.beta, inner.label) == (1.0, "second")
    assert (limited.sample(100)["priority_weight"] < 1).any()
    limited = copy.copy(limited)
    limited.beta = 0.5
    assert buffer.beta == 0.5


@BUFFERS
def test_the_priority_of_a_frame_that_is_gone_is_ignored(buffer_of: Any) -> None:
    torch.manual_seed(0)
    buffer = dc.Prioritized(buffer_of(4), alpha=1.0)
    buffer.extend(frames(0, 1, 2, 3))
    sample = buffer.sample(1000)
    buffer.add(frames(4)[0])  # in place of 0
    buffer.extend(frames(5))
    sample["td_error"] = torch.full((1000,), 0.01)
    assert buffer.update_tensordict_priority(sample) == (sample["number"] >= 2).sum()
    assert shares(buffer, 6) == pytest.approx(
        [0, 0, 0.01 / 2.02, 0.01 / 2.02, 1 / 2.02, 1 / 2.02], abs=0.01
    )
    sample = buffer.sample(10)
    buffer.empty()
    sample["td_error"] = torch.ones(10)
    assert buffer.update_tensordict_priority(sample) == 0
    with pytest.raises(dc.CollectorStateError, match="no frames to sample"):
        buffer.sample(1)
    buffer.extend(frames(6))
    assert buffer.sample(1)["number"] == 6


@BUFFERS
@pytest.mark.parametrize("limited", [True, False])
def test_while_frames_are_added(buffer_of: Any, limited: bool) -> None:
    """The priority of a frame that was overwritten meanwhile is left out."""
    buffer: Any = dc.Prioritized(buffer_of(CAPACITY))
    if limited:
        buffer = dc.RateLimited(buffer, samples_per_insert=1.0, min_size=16)
    collector = loopback_collector(
        "CartPole-v1", frames_per_batch=16, num_workers=2, replay_buffer=buffer
    )
    with collector:
        collector.next()
        collector.start()
        for _ in range(3):
            sample, late = buffer.sample(32), buffer.sample(8)
            sample["td_error"], late["td_error"] = torch.rand(32, 1), torch.rand(8, 1)
            assert buffer.update_tensordict_priority(sample) <= 32
            until = collector.frames + CAPACITY + 16
            while collector.frames < until:
                buffer.sample(8)
            assert buffer.update_tensordict_priority(late) == 0


def test_it_is_used_as_torchrls_is() -> None:
    """A loop samples by priority, and added frames count."""
    buffer: Any = dc.Prioritized(torchrls(8), alpha=1.0)
    limited = dc.RateLimited(buffer, 1.0, min_size=4, slack=1e6)
    for number in range(4):
        limited.add(frames(number)[0])
    assert limited.sample().shape == (16,)
    give(buffer, lambda number: 1e-4 + (number == 2))
    for sample in (next(iter(limited)), buffer.next(), limited.next()):
        assert (sample["number"] == 2).float().mean() > 0.9
        assert sample["priority_weight"].shape == (16,)
    assert limited[2]["number"] == buffer[2]["number"] == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dc.Prioritized(Buffer()), r"must have extend\(\) and buffer\[indices\]"),
        (lambda: dc.Prioritized(dc.RateLimited(torchrls(8), 1.0)), r"RateLimited\(Prioritized"),
        (lambda: dc.Prioritized(Ring(8), alpha=-1), "alpha=-1.*0 or more"),
        (lambda: dc.Prioritized(Ring(8)).sample(), "give batch_size"),
        (lambda: dc.Prioritized(Ring(8)).update_priority([0], 1.0), "by update_tensordict_priori"),
        (
            lambda: dc.Prioritized(Ring(8), priority_key="error").update_tensordict_priority(
                frames(0)
            ),
            r"no \['index', 'generation', 'error'\] in what was passed.*its 'error'",
        ),
        (lambda: dc.Prioritized(NoIndices(8)).extend(frames(0)), "returned None.* indices"),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(dc.DistCollectError, match=message):
        make()


class NoIndices(Ring):
    def extend(self, frames: TensorDict) -> None:
        super().extend(frames)
