"""Replay buffers: filled while iterating, filled in the background, at a rate."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.envs import SamplingEnv, StepCountEnv
from helpers.loopback_pool import backend_of, loopback_collector
from helpers.policies import ConstantPolicy, ShownWeight
from helpers.replay_buffers import Buffer, T
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc
from distcollect.common import signals

FRAMES = 2 * T


def sync(buffer: Any, **settings: Any) -> dc.SyncDataCollector:
    sizes = {"frames_per_batch": FRAMES, "envs_per_worker": 2}
    return dc.SyncDataCollector("CartPole-v1", **sizes, replay_buffer=buffer, **settings)


def pooled(buffer: Any, **settings: Any) -> dc.RPCDataCollector:
    sizes = {"frames_per_batch": FRAMES, "envs_per_worker": 2, "num_workers": 2}
    return loopback_collector("CartPole-v1", **sizes, replay_buffer=buffer, **settings)


BOTH = pytest.mark.parametrize("collector_of", [sync, pooled])


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    yield
    signals.stop_watching()


@BOTH
def test_iterating(collector_of: Any) -> None:
    buffer = Buffer()
    with collector_of(buffer, total_frames=3 * FRAMES) as collector:
        assert list(collector) == [None] * 3
    assert buffer.inserts == [FRAMES] * 3
    assert {frame.batch_size for frame in buffer.frames} == {torch.Size([])}
    # The frames of one env's rollout are adjacent.
    rows = torch.stack(buffer.frames).reshape(-1, T)
    ids, done = rows["collector", "traj_ids"], rows["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


@BOTH
def test_in_the_background(collector_of: Any) -> None:
    buffer = Buffer()
    collector = collector_of(buffer, total_frames=20 * FRAMES)
    collector.start()
    with pytest.raises(dc.CollectorStateError, match="in the background since start"):
        collector.next()
    with pytest.raises(dc.CollectorStateError, match="started already"):
        collector.start()
    eventually(lambda: not collector.is_running)
    assert len(buffer) == collector.frames == 20 * FRAMES
    collector.async_shutdown()
    assert "distcollect-collect" not in {thread.name for thread in threading.enumerate()}


def first_in_the_background(prepare: Callable[[dc.SyncDataCollector], object]) -> torch.Tensor:
    """Observations of the first batch that is collected in the background."""
    buffer = Buffer()
    with sync(buffer) as collector:
        prepare(collector)
        num_before = len(buffer)
        collector.start()
        eventually(lambda: len(buffer) >= num_before + FRAMES)
    frames = buffer.frames[num_before : num_before + FRAMES]
    return torch.stack(frames)["observation"]


def test_a_resumed_run_does_not_repeat_its_episodes_in_the_background() -> None:
    with sync(None) as collector:
        collector.set_seed(7)
        begun = collector.next()["observation"].reshape(FRAMES, -1)
        state = collector.state_dict()
    resumed = first_in_the_background(lambda it: it.load_state_dict(state))
    assert not torch.equal(resumed, begun)
    again = first_in_the_background(lambda it: (it.set_seed(7), it.next()))
    assert not torch.equal(again, begun)


def test_start_leaves_the_trainers_random_numbers_alone() -> None:
    def draw(seed: int) -> list[float]:
        with sync(Buffer(), total_frames=FRAMES) as collector:
            collector.set_seed(7)
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            collector.start()
            return [float(torch.rand(1)), np.random.rand(), random.random()]  # noqa: NPY002

    assert not {*draw(1)} & {*draw(2)}


def test_weights_are_published_just_as_a_batch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread publishes, so that nobody looks for changes of the weights any more."""
    watched = iter([SimpleNamespace(batch_begins=lambda: None)])
    with sync(None) as collector:
        seen = property(lambda _: next(watched, None))
        monkeypatch.setattr(type(backend_of(collector)), "unpublished", seen)
        assert collector.next().numel() == FRAMES


@BOTH
def test_pause(collector_of: Any) -> None:
    buffer = Buffer()
    collector = collector_of(buffer)
    collector.start()
    try:
        for _ in range(3):
            eventually(lambda: buffer.inserts)
            with collector.pause():
                paused_at = len(buffer.inserts)
                time.sleep(0.05)
                assert len(buffer.inserts) == paused_at
            eventually(lambda: len(buffer.inserts) > paused_at)  # noqa: B023 - called at once
    finally:
        collector.async_shutdown(timeout=60)
    assert len(buffer) == sum(buffer.inserts)


@BOTH
def test_failure_is_told(collector_of: Any) -> None:
    class Full(Buffer):
        def extend(self, data: TensorDict) -> None:
            if len(self.inserts) == 2:
                raise OSError("disk full")
            super().extend(data)

    buffer = dc.RateLimited(Full(), 1.0, min_size=10 * FRAMES)
    collector = collector_of(buffer)
    collector.start()
    with pytest.raises(dc.CollectorStateError, match="no more frames come in: disk full"):
        buffer.sample(4)
    with pytest.raises(OSError, match="disk full"):
        collector.update_policy_weights_()
    with pytest.raises(OSError, match="disk full"):
        collector.async_shutdown()
    with pytest.raises(dc.CollectorStateError, match="shut down"):
        collector.start()


@BOTH
def test_rate_is_kept_from_both_sides(collector_of: Any) -> None:
    per_insert, min_size, slack, size = 2.0, 4 * FRAMES, 8.0, 16
    buffer = dc.RateLimited(Buffer(), per_insert, min_size=min_size, slack=slack)
    collector = collector_of(buffer)
    collector.start()
    try:
        sampled = 0
        for step in range(60):
            if step % 20 == 19:
                # The consumer stalls: collection stops at the limit.
                time.sleep(0.2)
            assert len(buffer.sample(size)) == size
            sampled += size
            owed = (len(buffer) - min_size) * per_insert - sampled
            # Each side is ahead by at most the slack and one of its batches.
            assert -slack - size <= owed <= slack + FRAMES * per_insert
    finally:
        collector.async_shutdown()


@pytest.mark.parametrize("error", [None, OSError("disk full")])
def test_the_first_of_two_collectors_to_end(error: OSError | None) -> None:
    """While the other one fills the buffer, the rate holds; the error is told at the end."""
    buffer = dc.RateLimited(Buffer(), 1.0, slack=0.0, timeout_s=0.1)
    frames = TensorDict({"observation": torch.zeros(5)}, [5])
    for _ in range(2):
        buffer.begin()
    buffer.extend(frames)
    buffer.end(error)
    assert len(buffer.sample(5)) == 5
    with pytest.raises(dc.DeadlineError, match="5 came in, 5 samples were drawn"):
        buffer.sample(1)
    buffer.extend(frames)
    assert len(buffer.sample(5)) == 5
    buffer.end(None)
    if error is None:
        assert len(buffer.sample(100)) == 100
    else:
        with pytest.raises(dc.CollectorStateError, match="no more frames come in: disk full"):
            buffer.sample(1)


def test_two_collectors_fill_a_buffer() -> None:
    buffer = dc.RateLimited(Buffer(), 1.0, slack=FRAMES)
    with sync(buffer, total_frames=2 * FRAMES) as first, sync(buffer) as second:
        second.start()
        first.start()
        sampled = 0
        while first.is_running or sampled < 10 * FRAMES:
            sampled += len(buffer.sample(4))
            assert sampled <= len(buffer) + FRAMES + 4


@BOTH
def test_a_loop_over_one_that_has_filled_its_buffer_says_where_the_frames_are(
    collector_of: Any,
) -> None:
    with collector_of(Buffer(), total_frames=2 * FRAMES) as collector:
        collector.start()
        eventually(lambda: not collector.is_running)
        with pytest.raises(
            dc.CollectorStateError, match=rf"all total_frames={2 * FRAMES} .* were added to the"
        ):
            next(iter(collector))


@BOTH
def test_too_few_frames_ever(collector_of: Any) -> None:
    buffer = dc.RateLimited(Buffer(), 1.0, min_size=3 * FRAMES)
    collector = collector_of(buffer, total_frames=2 * FRAMES)
    collector.start()
    with pytest.raises(
        dc.CollectorStateError, match=rf"min_size={3 * FRAMES} .* only {2 * FRAMES}"
    ):
        buffer.sample(1)
    collector.async_shutdown()


def test_sampling_has_a_deadline() -> None:
    buffer = dc.RateLimited(Buffer(), 1.0, min_size=5, timeout_s=0.1)
    with pytest.raises(dc.CollectorStateError, match=r"no collector's start\(\) fills it"):
        buffer.sample(2)
    buffer.begin()
    with pytest.raises(dc.DeadlineError, match=r"waited 0.1 s .* 0 came in, .*min_size=5"):
        buffer.sample(2)


def depth_camera() -> SamplingEnv:
    return SamplingEnv(gym.spaces.Box(0, 2**16 - 1, (4,), np.uint16))


@pytest.mark.parametrize("kind", [dc.SyncDataCollector, dc.RPCDataCollector])
def test_torchrl_buffer_that_cannot_hold_the_frames(kind: Any) -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer  # noqa: PLC0415

    make = kind if kind is dc.SyncDataCollector else partial(loopback_collector, num_workers=1)
    lazy = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    for buffer in (lazy, dc.RateLimited(lazy, 1.0)):
        with pytest.raises(dc.SpaceError, match=r"LazyTensorStorage can't hold obs.* \[4\] uint16"):
            make(depth_camera, frames_per_batch=8, replay_buffer=buffer)
    listed = ReplayBuffer(storage=ListStorage(100), batch_size=4)
    with make(depth_camera, frames_per_batch=8, replay_buffer=listed) as collector:
        collector.next()
    assert listed.sample()["observation"].dtype is torch.uint16


def test_rate_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from torchrl.data import ListStorage, ReplayBuffer  # noqa: PLC0415

    def limited() -> dc.RateLimited:
        return dc.RateLimited(wrapped(), 2.0, min_size=8, slack=0.0, timeout_s=5.0)

    def wrapped() -> ReplayBuffer:
        return ReplayBuffer(storage=ListStorage(100), batch_size=4)

    first = limited()
    frames = TensorDict({"observation": torch.arange(12.0)}, [12])
    first.begin()
    first.extend(frames)
    assert len(first.sample()) == 4  # of the 8 that are owed for the 4 frames above min_size
    dc.Checkpoint(tmp_path / "state.pt", buffer=first).save()
    second = limited()
    assert dc.Checkpoint(tmp_path / "state.pt", buffer=second).load()
    assert len(second) == 12
    second.begin()
    assert len(second.sample()) == 4  # the other 4; without the counters none may be drawn
    assert second.state_dict()["sampled"] == 8
    with pytest.raises(dc.ArgumentError, match="not of a RateLimited"):
        second.load_state_dict(wrapped().state_dict())


class TwoSteps(Buffer):
    """A buffer that is written to in two steps; its state is what it works with, as TorchRL's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(2, dtype=torch.int64)

    def extend(self, data: TensorDict) -> None:
        self.counts[0] += len(data)
        time.sleep(0.005)
        self.counts[1] += len(data)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    load_state_dict = state_dict  # it is not loaded


class Slow:
    """A part that takes its time."""

    def state_dict(self) -> dict[str, int]:
        time.sleep(0.05)
        return {}

    load_state_dict = state_dict


@BOTH
def test_a_checkpoint_has_whole_batches(collector_of: Any, tmp_path: Path) -> None:
    """Also at a signal, while the user waits for samples."""
    buffer = dc.RateLimited(TwoSteps(), 1.0, min_size=10**9)
    collector = collector_of(buffer)
    parts = {"buffer": buffer, "slow": Slow(), "collector": collector}
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", **parts)
    with collector:
        collector.start()
        for number in range(8):
            eventually(lambda before=collector.frames: collector.frames > before)
            if number < 7:
                checkpoint.save()
            else:
                threading.Timer(0.05, signal.raise_signal, (signal.SIGTERM,)).start()
                with pytest.raises(SystemExit):
                    buffer.sample(1)
            saved = torch.load(checkpoint.path, weights_only=True)["parts"]
            counts = saved["buffer"]["buffer"]["counts"].tolist()
            frames = saved["buffer"]["inserted"], saved["collector"]["frames"]
            assert {*counts, *frames} == {counts[0]}


def test_rate_of_a_buffer_without_a_state() -> None:
    with pytest.raises(dc.ArgumentTypeError, match="no state_dict"):
        dc.Checkpoint("state.pt", buffer=dc.RateLimited(Buffer(), 1.0))


class Permitted(StepCountEnv):
    """Each step needs a permit."""

    permits = threading.Semaphore(0)
    num_steps = 0

    def step(self, action: np.int64) -> Any:
        assert Permitted.permits.acquire(timeout=60)
        Permitted.num_steps += 1
        return super().step(action)

    @classmethod
    def make_steps(cls, count: int) -> None:
        wanted = cls.num_steps + count
        cls.permits.release(count)
        eventually(lambda: cls.num_steps == wanted)


def test_no_trajectory_in_a_buffer_goes_on_over_masked_frames() -> None:
    buffer, policy, rests = Buffer(), ConstantPolicy(), set[int]()
    Permitted.permits, Permitted.num_steps = threading.Semaphore(0), 0
    with loopback_collector(
        Permitted,
        policy,
        frames_per_batch=T,
        num_workers=1,
        sync=False,
        replay_buffer=buffer,
        staleness=dc.Staleness(max_policy_lag=0, mode="mask"),
    ) as collector:
        Permitted.permits.release(T)
        collector.next(60)
        # The steps with the old weights: parts of rollouts; all of one, and a part of the next.
        for num_steps, num_batches in ((3, 1), (5, 1), (T + 2, 2), (T - 4, 1)):
            Permitted.make_steps(num_steps)
            collector.update_policy_weights_(policy)
            Permitted.make_steps(T * num_batches - num_steps)
            for _ in range(num_batches):
                collector.next(60)
                rests |= collector.rests
        Permitted.permits.release(100 * T)
    frames = torch.stack(buffer.frames)
    ids, numbers = frames["collector", "traj_ids"], frames["observation"][:, 0]
    goes_on = numbers[1:] == numbers[:-1] + 1
    assert torch.equal(ids[1:] == ids[:-1], goes_on)
    assert rests == {*ids.tolist()} - {int(ids[0])}
    assert len(frames) == 6 * T - sum(collector.stale_frames.values())
    assert len(rests) == 4


class Fragile(StepCountEnv):
    """Raises in so many of its next resets."""

    num_failing = 0

    def reset(self, **kwargs: Any) -> Any:
        if Fragile.num_failing:
            Fragile.num_failing -= 1
            raise RuntimeError("down")
        return super().reset(**kwargs)


@pytest.mark.parametrize("is_torchrl", [False, True])
def test_start_on_envs_that_raise(is_torchrl: bool) -> None:
    """One that may not be replaced makes start() raise: its trajectory ends all the same."""
    if is_torchrl:
        envs = pytest.importorskip("torchrl.envs", reason="the torchrl extra is not installed")

    def make() -> Any:
        return envs.GymWrapper(Fragile()) if is_torchrl else Fragile()

    for max_faults in (0, 3):
        buffer = Buffer()
        faults = dc.Faults(max_env_faults=max_faults)
        with dc.SyncDataCollector(
            make, frames_per_batch=T, total_frames=3 * T, replay_buffer=buffer, faults=faults
        ) as collector:
            collector.next()
            Fragile.num_failing = 1
            if max_faults == 0:
                with pytest.raises(dc.EnvError, match="down"):
                    collector.start()
                collector.next()
                collector.start()
            else:
                collector.start()
                assert collector.ledger.total.env_faults == 1
            eventually(lambda: not collector.is_running)
        frames = torch.stack(buffer.frames)
        ids, steps = frames["collector", "traj_ids"], frames["observation"][:, 0]
        assert torch.equal(ids[1:] == ids[:-1], steps[1:] == steps[:-1] + 1)
        assert len(frames) == 3 * T


def test_start_on_envs_of_evaluations_that_do_not_close() -> None:
    class Clinging(StepCountEnv):
        def close(self) -> None:
            if Fragile.num_failing:
                Fragile.num_failing -= 1
                raise RuntimeError("stuck")

    policy, buffer = ShownWeight(), Buffer()
    with dc.SyncDataCollector(
        Clinging, policy, frames_per_batch=T, max_frames_per_traj=T, replay_buffer=buffer
    ) as collector:
        collector.evaluate(1)
        Fragile.num_failing = 1
        with pytest.raises(dc.EnvError, match="stuck"):
            collector.start()
        # It collects as before: with the policy itself.
        policy.weight.data.fill_(3)
        collector.next()
        assert collector.evaluate(1).returns.tolist() == [T]
        assert buffer.frames[-1]["weight"] == 3
        collector.start()


def test_lags_of_frames_that_are_collected_in_the_background() -> None:
    Permitted.permits, Permitted.num_steps = threading.Semaphore(0), 0
    policy, buffer = ConstantPolicy(), Buffer()
    with dc.SyncDataCollector(
        Permitted, policy, frames_per_batch=T, total_frames=T, replay_buffer=buffer
    ) as collector:
        collector.start()
        for _ in range(2):
            Permitted.make_steps(2)
            collector.update_policy_weights_(policy)
        Permitted.permits.release(T - 4)
        eventually(lambda: not collector.is_running)
        lags = 2 - torch.stack(buffer.frames)["collector", "policy_version"]
        assert lags.max() == 2
        assert collector.version_lag == collector.policy_age == (0, lags.double().mean(), 2)
        assert collector.stats().lag.frames == Counter(lags.tolist())
