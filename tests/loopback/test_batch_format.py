"""The shapes of batches: joined, split by trajectory, whole trajectories, compacted."""

from __future__ import annotations

import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.policies import ConstantPolicy
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import NonTensorStack, TensorDict

import distcollect as dc
from distcollect.collectors.batch_format import split

T = 5


class Lengths(gym.Env):
    """Episode k of env i has ``lengths[k % len]`` frames; observes (i, k, frame)."""

    observation_space = gym.spaces.Box(-1, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int, lengths: tuple[int, ...]) -> None:
        self._index, self._lengths = index, lengths
        self._episode, self._frame = -1, 0

    def _seen(self) -> np.ndarray:
        return np.array([self._index, self._episode, self._frame], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._frame = self._episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._frame += 1
        over = self._frame == self._lengths[self._episode % len(self._lengths)]
        return self._seen(), float(self._frame), over, False, {}


class Maker:
    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths

    def __call__(self, context: dc.EnvContext) -> Lengths:
        return Lengths(10 * context.worker_id + context.env_index, self._lengths)


def make(kind: Any, maker: Any, *, num_envs: int, num_workers: int = 2, **settings: Any) -> Any:
    if kind is dc.SyncDataCollector:
        frames = num_envs * T
        return kind(maker, frames_per_batch=frames, envs_per_worker=num_envs, **settings)
    sync = settings.get("sync", kind is dc.MultiSyncDataCollector)
    frames = num_envs * T * (num_workers if sync else 1)
    if kind is not dc.aSyncDataCollector:
        settings["num_workers"] = num_workers
    return loopback_collector(
        maker, kind=kind, frames_per_batch=frames, envs_per_worker=num_envs, **settings
    )


@pytest.mark.parametrize(
    ("kind", "num_envs", "settings", "shape"),
    [
        (dc.SyncDataCollector, 1, {}, (T,)),
        (dc.SyncDataCollector, 3, {}, (3, T)),
        (dc.aSyncDataCollector, 1, {}, (T,)),
        (dc.aSyncDataCollector, 3, {}, (3, T)),
        (dc.MultiaSyncDataCollector, 1, {}, (T,)),
        (dc.MultiaSyncDataCollector, 3, {}, (3, T)),
        (dc.MultiSyncDataCollector, 1, {}, (2, T)),
        (dc.MultiSyncDataCollector, 3, {}, (2, 3, T)),
        (dc.MultiSyncDataCollector, 1, {"cat_results": 0}, (2 * T,)),
        (dc.MultiSyncDataCollector, 3, {"cat_results": 0}, (6, T)),
        (dc.MultiSyncDataCollector, 1, {"cat_results": -1}, (2 * T,)),
        (dc.MultiSyncDataCollector, 3, {"cat_results": -1}, (3, 2 * T)),
        (dc.RPCDataCollector, 1, {}, (1, T)),
        (dc.RPCDataCollector, 1, {"sync": True}, (2, T)),
        (dc.RPCDataCollector, 1, {"sync": True, "cat_results": "stack"}, (2, 1, T)),
        (dc.RPCDataCollector, 1, {"sync": True, "cat_results": -1}, (1, 2 * T)),
    ],
)
def test_shape(kind: Any, num_envs: int, settings: Any, shape: tuple[int, ...]) -> None:
    with make(kind, Maker(3, 4), num_envs=num_envs, **settings) as collector:
        batch = collector.next()
    for node in (batch, batch["next"], batch["collector"]):
        assert isinstance(node, TensorDict)
        assert node.shape == shape
        assert node.names == [None] * (len(shape) - 1) + ["time"]
    rows = batch["observation"].reshape(-1, T, 3)
    # Each row belongs to one env, from its first frame on.
    assert (rows[:, 0, 1:] == 0).all()
    assert (rows[..., 0] == rows[:, :1, 0]).all()
    if settings.get("cat_results") == -1 and num_envs == 3:
        assert batch["observation"][1, :, 0].tolist() == [1] * T + [11] * T
        assert batch["collector", "worker_id"][1].tolist() == [0] * T + [1] * T


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "bool", "float16", "int8"])
@pytest.mark.parametrize(
    "settings", [{"split_trajs": True}, {"trajs_per_batch": 2}, {"replay_buffer": True}], ids=str
)
def test_dtypes_of_trajectories(settings: dict[str, Any], dtype: str) -> None:
    space = gym.spaces.Box(0, 1, (2,), np.dtype(dtype).type)

    class Typed(gym.ObservationWrapper):
        def __init__(self) -> None:
            super().__init__(Lengths(0, (3, 4)))
            self.observation_space = space

        def observation(self, observation: Any) -> Any:
            return np.array([1, observation[2] % 2]).astype(dtype)

    buffer = KeepingBuffer()
    if "replay_buffer" in settings:
        settings = {"replay_buffer": buffer}
    with make(dc.RPCDataCollector, Typed, num_envs=2, **settings) as collector:
        batches = [collector.next() for _ in range(3)]
    for batch in buffer.added or batches:
        for entry in (batch["observation"], batch["next", "observation"]):
            assert entry.dtype == getattr(torch, dtype)
        keys = batch.keys(include_nested=True)
        is_real = batch["collector", "mask"] if ("collector", "mask") in keys else ...
        assert batch["observation"].to(int)[is_real][..., 0].all()


@pytest.mark.parametrize(
    ("kind", "limit_s", "is_given"),
    [
        (dc.SyncDataCollector, 0.2, True),
        (dc.SyncDataCollector, 0.2, False),
        (dc.MultiaSyncDataCollector, 3, True),
    ],
)
def test_trajectories_that_no_rollout_can_hold(kind: Any, limit_s: float, is_given: bool) -> None:
    """The wait has an end, and the error names the two arguments."""
    faults = dc.Faults(batch_timeout_s=600 if is_given else limit_s)
    settings = {"trajs_per_batch": 1, "reset_at_each_iter": True, "faults": faults}
    message = f"trajs_per_batch=1, .* within {limit_s} s was 0; with reset_at_each_iter"
    with make(kind, Maker(T + 1), num_envs=1, num_workers=1, **settings) as collector:
        with pytest.raises(dc.BatchTimeout, match=message):
            collector.next(limit_s if is_given else None)
        assert collector.frames > T


def test_a_timeout_is_for_all_rollouts_of_a_batch_of_trajectories() -> None:
    message = r"was 0; give next\(\) a longer timeout_s"
    with (
        make(dc.SyncDataCollector, Maker(10**9), num_envs=1, trajs_per_batch=2) as collector,
        pytest.raises(dc.BatchTimeout, match=message),
    ):
        collector.next(0.2)


class Slow(Lengths):
    """A rollout of T steps takes longer than 0.2 s."""

    def __init__(self) -> None:
        super().__init__(0, (T,))

    def step(self, action: Any) -> Any:
        time.sleep(0.06)
        return super().step(action)


@pytest.mark.parametrize("resets", [False, True])
def test_trajectories_that_come_one_by_one_have_a_batch_timeout_each(resets: bool) -> None:
    faults = dc.Faults(batch_timeout_s=0.2)
    settings = {"trajs_per_batch": 2, "reset_at_each_iter": resets, "faults": faults}
    with make(dc.SyncDataCollector, Slow, num_envs=1, **settings) as collector:
        assert collector.next().shape == (2, T)


@pytest.mark.parametrize("num_steps", [2 * T, 2 * T + 2])
def test_a_trajectory_that_a_fault_ends_is_not_whole(num_steps: int) -> None:
    """Whether the env raises at the first step of a rollout or within it."""
    left = [num_steps]

    class Raises(Lengths):
        def step(self, action: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError("worn out")
            return super().step(action)

    settings = {"num_envs": 1, "trajs_per_batch": 1}
    with make(dc.SyncDataCollector, lambda: Raises(0, (2 * T + 4,)), **settings) as collector:
        assert {collector.next().shape[1] for _ in range(3)} == {2 * T + 4}
        assert collector.abandoned_frames == num_steps


@pytest.mark.parametrize(("trajs", "num_batches"), [(2, 3), (4, 1)])
def test_whole_trajectories_end_with_the_frames(trajs: int, num_batches: int) -> None:
    """And a batch has exactly as many as were asked for."""
    kind = {"trajs_per_batch": trajs, "total_frames": 4 * T}
    with make(dc.SyncDataCollector, Maker(3), num_envs=1, **kind) as collector:
        batches = list(collector)
    # 20 frames are six episodes of three, and two more frames.
    assert [batch.shape for batch in batches] == [(trajs, 3)] * num_batches
    assert collector.frames == 4 * T
    assert collector.abandoned_frames == 4 * T - 3 * trajs * num_batches


@pytest.mark.parametrize(
    ("length", "added", "num_turns"),
    [
        pytest.param(3, [3, 6, 6, 3], 4, id="in each turn all that are whole"),
        pytest.param(9, [9, 9], 2, id="a turn ends with the first that is whole"),
        pytest.param(18, [18], 1, id="none after the last one"),
        pytest.param(99, [], 1, id="none, and one turn in which nothing is added"),
    ],
)
def test_a_buffer_gets_trajectories_as_soon_as_they_are_whole(
    length: int, added: list[int], num_turns: int
) -> None:
    buffer = KeepingBuffer()
    kind = {"trajs_per_batch": 4, "total_frames": 4 * T, "replay_buffer": buffer}
    with make(dc.SyncDataCollector, Maker(length), num_envs=1, **kind) as collector:
        assert list(collector) == [None] * num_turns
        assert [len(data) for data in buffer.added] == added
        assert collector.frames == 4 * T
        assert collector.abandoned_frames == 4 * T - sum(added)


@pytest.mark.parametrize("device", [torch.device("cpu"), None])
@pytest.mark.parametrize("settings", [{}, {"trajs_per_batch": 1}])
def test_frames_name_the_device_of_the_buffer(
    settings: dict[str, int], device: torch.device | None
) -> None:
    def without_device(batch: TensorDict) -> TensorDict:
        return batch.clear_device_()

    buffer = KeepingBuffer() if device is None else KeepingBuffer(device=device)
    kind = {"replay_buffer": buffer, "postproc": without_device, **settings}
    with make(dc.SyncDataCollector, Maker(3), num_envs=1, **kind) as collector:
        collector.next()
    [frames] = buffer.added
    assert [frames.device, frames["next"].device] == [device] * 2


def _selected(batch: TensorDict) -> TensorDict:
    return batch.select("observation", ("next", "reward"))


@pytest.mark.parametrize("settings", [{"split_trajs": True}, {"trajs_per_batch": 1}], ids=str)
@pytest.mark.parametrize(
    "postproc",
    [
        _selected,
        lambda batch: _selected(batch).reshape(-1),
        lambda batch: _selected(batch[batch["collector", "mask"]]),
    ],
    ids=["selected", "flat", "its own choice"],
)
def test_a_buffer_gets_no_padding_whatever_postproc_leaves_out(
    settings: dict[str, Any], postproc: Any
) -> None:
    buffer = KeepingBuffer()
    kind = {"replay_buffer": buffer, "postproc": postproc, "total_frames": 12 * T, **settings}
    with make(dc.SyncDataCollector, Maker(3, 1), num_envs=3, **kind) as collector:
        list(collector)
        num_frames = collector.frames - collector.abandoned_frames
    frames = torch.cat(buffer.added)
    assert len(frames) == num_frames
    assert {*frames.keys()} == {"observation", "next"}
    assert (frames["next", "reward"] > 0).all(), "padding has no rewards"


@pytest.mark.parametrize("kind", [dc.SyncDataCollector, dc.MultiSyncDataCollector])
def test_the_ledger_knows_of_frames_that_nobody_has_yet(kind: Any) -> None:
    """With whole trajectories, a frame is delivered when its trajectory is."""

    def count(batch: TensorDict) -> int:
        return int(batch["collector", "mask"].sum())

    with make(kind, Maker(3, 99), num_envs=2, trajs_per_batch=1) as collector:
        numbers = [count(collector.next())]
        stats, total = collector.stats(), collector.ledger.total
        assert total.delivered == stats.delivered == sum(numbers) == 3
        assert (total.open, total.lost) == (total.stepped - 3, {})
        numbers.append(count(collector.next()))
    total, workers = collector.ledger.total, collector.ledger.workers.values()
    assert (total.delivered, total.open) == (sum(numbers), 0)
    assert total.lost["unfinished"] == collector.abandoned_frames > 0
    assert total.stepped == total.delivered + sum(total.lost.values())
    assert sum(each.delivered for each in workers) == total.delivered


def test_trajectories_that_a_thread_has_begun_are_not_open_after_the_end() -> None:
    buffer = KeepingBuffer()
    kind = {"trajs_per_batch": 1, "replay_buffer": buffer}
    with make(dc.SyncDataCollector, Maker(3, 9999), num_envs=1, **kind) as collector:
        collector.start()
        eventually(lambda: collector.frames > 10 * T)
    total = collector.ledger.total
    assert (total.delivered, total.open) == (3, 0)


def test_whole_trajectories_without_padding() -> None:
    kind = {"trajs_per_batch": 2, "total_frames": 4 * T, "traj_format": "cat"}
    with make(dc.SyncDataCollector, Maker(3), num_envs=1, **kind) as collector:
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(6,)] * 3
    assert batches[0].names == ["time"]
    assert batches[0]["next", "done"].squeeze(-1).tolist() == [False, False, True] * 2


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (dc.SyncDataCollector, lambda collector: collector.reset()),
        (dc.SyncDataCollector, lambda collector: collector.set_seed(0)),
        (dc.MultiSyncDataCollector, lambda collector: collector.set_seed(0)),
    ],
)
def test_a_reset_or_a_seed_drops_trajectories_that_were_not_delivered(kind: Any, call: Any) -> None:
    with make(kind, Maker(2), num_envs=1, trajs_per_batch=1) as collector:
        collector.next()
        # Whole ones wait, and the third of each env has begun.
        call(collector)
        assert collector.next()["observation"][0, :, 1].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("call", "num_abandoned"),
    [
        (lambda collector: collector.update_policy_weights_(), 0),
        (lambda collector: collector.set_seed(0), T),
    ],
    ids=["new weights", "a seed"],
)
def test_trajectories_that_the_buffer_did_not_take_are_added_later_or_counted(
    call: Any, num_abandoned: int
) -> None:
    class Full(KeepingBuffer):
        is_full = True

        def extend(self, data: TensorDict) -> None:
            if self.is_full:
                raise OSError("no space left")
            super().extend(data)

    buffer = Full()
    kind = {"trajs_per_batch": 1, "replay_buffer": buffer, "policy": ConstantPolicy()}
    with make(dc.SyncDataCollector, Maker(T), num_envs=1, **kind) as collector:
        with pytest.raises(OSError, match="no space left"):
            collector.next()
        call(collector)
        buffer.is_full = False
        for _ in range(3):
            collector.next()
        assert [len(data) for data in buffer.added] == [T] * 3
        assert collector.abandoned_frames == num_abandoned
        assert collector.frames == 3 * T + num_abandoned


def test_the_first_trajectories_after_a_seed_are_whole() -> None:
    kind = {"trajs_per_batch": 1, "reproducible": True}
    with make(dc.MultiaSyncDataCollector, Maker(T + 2), num_envs=1, **kind) as collector:
        collector.next()
        collector.set_seed(0)  # which gives up rollouts
        before = collector.abandoned_frames
        assert {collector.next().shape[1] for _ in range(4)} == {T + 2}
        assert collector.abandoned_frames == before


@pytest.mark.parametrize("kind", [dc.SyncDataCollector, dc.MultiSyncDataCollector])
def test_no_trajectory_goes_on_after_a_rollout_that_was_not_delivered(kind: Any) -> None:
    is_wanted = iter([1, 1, 0, 1, 1, 0, 0, 1, 1, 1])

    def wanted(batch: TensorDict) -> TensorDict:
        if not next(is_wanted):
            raise KeyError("not wanted")
        return batch

    batches: list[TensorDict] = []
    with make(kind, Maker(2 * T + 3, 10**9), num_envs=2, postproc=wanted) as collector:
        for number in range(10):
            try:
                batches.append(collector.next().reshape(-1, T))
            except KeyError:
                assert number in (2, 5, 6)
    frames = torch.cat(batches, 1)
    seen, ids = frames["observation"], frames["collector", "traj_ids"]
    follows = (seen[:, 1:] - seen[:, :-1] == torch.tensor([0.0, 0.0, 1.0])).all(-1)
    assert torch.equal(ids[:, 1:] == ids[:, :-1], follows)
    assert len(ids.unique()) == int((~follows).sum()) + len(ids)


def test_a_seed_drops_no_trajectories_that_are_on_their_way_to_the_buffer() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(batch: TensorDict) -> TensorDict:
        begun.set()
        assert may_end.wait(60)
        return batch

    buffer = KeepingBuffer()
    kind = {"trajs_per_batch": 1, "replay_buffer": buffer, "postproc": slow}
    with make(dc.MultiSyncDataCollector, Maker(2), num_envs=1, **kind) as collector:
        collector.start()
        assert begun.wait(60)
        collector.set_seed(0)
        assert collector.abandoned_frames == 0
        may_end.set()
        eventually(lambda: buffer.added)


@pytest.mark.parametrize("settings", [{"split_trajs": True}, {"trajs_per_batch": 2}], ids=str)
def test_padding_is_marked_also_without_ids(settings: dict[str, Any]) -> None:
    settings |= {"num_envs": 2, "track_traj_ids": False}
    with make(dc.SyncDataCollector, Maker(2, 1), **settings) as collector:
        batch = collector.next()
    assert list(batch["collector"].keys()) == ["mask"]
    assert not batch["collector", "mask"].all()
    buffer = KeepingBuffer()
    settings |= {"replay_buffer": buffer}
    with make(dc.SyncDataCollector, Maker(2, 1), **settings) as collector:
        collector.next()
    # A frame's reward is its number, from 1 on; padding has none.
    assert (buffer.added[0]["next", "reward"] > 0).all()


def test_compact_obs() -> None:
    with make(dc.SyncDataCollector, Maker(3), num_envs=2, compact_obs=True) as collector:
        batch = collector.next()
    assert "observation" in batch
    assert set(batch["next"].keys()) == {"reward", "done", "terminated", "truncated"}


def test_entries_that_are_no_tensors_are_split_too() -> None:
    texts = NonTensorStack("a0", "a1", "b0", "b1", "b2")
    ids = torch.tensor([[0, 0, 1, 1, 1]])
    inner = TensorDict({"text": texts.unsqueeze(0)}, [1, 5])
    rows = TensorDict({"inner": inner, "collector": {"traj_ids": ids}}, [1, 5])
    text = split(rows).get(("inner", "text"))
    assert text.tolist() == [["a0", "a1", "a1"], ["b0", "b1", "b2"]]


def test_rollouts_joined_along_time_have_no_padding() -> None:
    """The second worker is preempted."""

    class OneIsSlow(Lengths):
        def __init__(self, context: dc.EnvContext) -> None:
            super().__init__(context.worker_id, (T,))

        def step(self, action: Any) -> Any:
            time.sleep(0.2 * self._index)
            return super().step(action)

    settings = {"cat_results": -1, "preemptive_threshold": 0.5}
    with make(dc.MultiSyncDataCollector, OneIsSlow, num_envs=1, **settings) as collector:
        batch = collector.next()
    assert T <= len(batch) < 2 * T
    assert (batch["collector", "traj_ids"] >= 0).all()
    assert batch["collector", "mask"].all()
    assert batch["observation"][:T, 0].tolist() == [0] * T
