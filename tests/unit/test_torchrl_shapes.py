"""Entries of TorchRL frames whose shape changes, and entries that are not always there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.torchrl_checks import zoo
from tensordict import LazyStackedTensorDict, TensorDictBase

import distcollect as dc

__all__ = ["zoo"]


@pytest.mark.parametrize(
    ("options", "shape", "expected"),
    [
        ({"trajs_per_batch": 3, "traj_format": "cat", "max_frames_per_traj": 2}, (6,), 3 * [0, 1]),
        ({"set_truncated": True, "storing_device": "cpu"}, (2, 5), 2 * [0, 1, 2, 0, 1]),
    ],
)
def test_entries_whose_shape_changes_at_each_step(
    zoo: Any, options: dict[str, Any], shape: tuple[int, ...], expected: list[int]
) -> None:
    with dc.SyncDataCollector(
        lambda: zoo.Growing().add_truncated_keys(),
        frames_per_batch=10,
        envs_per_worker=2,
        **options,
    ) as collector:
        batch = collector.next()
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.shape == shape
    assert batch.names[-1] == "time"
    frames = batch.reshape(-1).unbind(0)
    assert [frame["observation"].tolist() for frame in frames] == [[n] * (n + 1) for n in expected]
    assert [len(frame["next", "observation"]) - 2 for frame in frames] == expected
    if "set_truncated" in options:
        truncated = batch["next", "truncated"].squeeze(-1)
        assert truncated.tolist() == 2 * [4 * [False] + [True]]


def test_what_a_policy_writes_has_one_shape(zoo: Any) -> None:
    size = 2

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.update({"action": torch.zeros(1), "more": torch.full((size,), 7.0)})

    with dc.SyncDataCollector(zoo.Counter, policy, frames_per_batch=1) as collector:
        ids = collector.next()["collector", "traj_ids"]
        assert (ids % 2**20).tolist() == [0]  # where the ids of a collector may begin
        size = 6
        with pytest.raises(dc.EnvError, match=r"'more' has shape \[6\], but before it had \[2\]"):
            collector.next()


def test_an_entry_that_only_steps_give(zoo: Any) -> None:
    with dc.SyncDataCollector(zoo.LateEntry, frames_per_batch=5) as collector:
        batch = collector.next()
    assert batch["next", "late"].flatten().tolist() == [1, 2, 3, 1, 2]
    assert batch["late"].flatten().tolist() == [0, 1, 2, 3, 1]  # as TorchRL keeps it at a reset


@pytest.mark.parametrize("frames_per_batch", [1, 2, 5])
@pytest.mark.parametrize("lacking", ["late", "more"])
def test_an_entry_that_is_missing_in_mid_run(zoo: Any, frames_per_batch: int, lacking: str) -> None:
    steps = 0

    class Forgetful(zoo.LateEntry):  # type: ignore[misc]
        def _step(self, tensordict: Any) -> Any:
            nonlocal steps
            steps += 1
            following = super()._step(tensordict)
            return following.exclude(lacking) if steps == 4 else following

    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"] = torch.zeros(1)
        if steps != 3 or lacking != "more":
            td["next", "more"] = torch.ones(1)
        return td

    with (
        dc.SyncDataCollector(Forgetful, policy, frames_per_batch=frames_per_batch) as collector,
        pytest.raises(dc.EnvError, match=f"no entry 'next.{lacking}', though other frames"),
    ):
        [collector.next() for _ in range(4)]


def test_what_a_policy_writes_is_missing_in_random_frames(zoo: Any) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        td["action"] = torch.zeros(1)
        td["next", "more"] = torch.ones(1)
        return td.set("logits", torch.ones(2))

    with dc.SyncDataCollector(
        zoo.LateEntry, policy, frames_per_batch=3, init_random_frames=6, reset_at_each_iter=True
    ) as collector:
        batches = [collector.next() for _ in range(4)]
    assert [batch["next", "more"].sum().item() for batch in batches] == [0, 0, 3, 3]
    assert [batch["logits"].sum().item() for batch in batches] == [0, 0, 6, 6]
    assert [batch["late"].flatten().tolist() for batch in batches] == 4 * [[0, 1, 2]]


@pytest.mark.parametrize("size", [1e38, 1e39, math.inf])
def test_a_number_that_would_become_infinite(zoo: Any, size: float) -> None:
    class Large(zoo.Counter):  # type: ignore[misc]
        def _step(self, tensordict: Any) -> Any:
            reward = torch.full((1,), size, dtype=torch.float64)
            return super()._step(tensordict).set("reward", reward)

    with dc.SyncDataCollector(Large, frames_per_batch=4, check_nan=False) as collector:
        if size == 1e39:
            with pytest.raises(dc.EnvError, match="'reward' has values of float64 that can't be"):
                collector.next()
        else:
            assert collector.next()["next", "reward"].eq(torch.tensor(size)).all()


@pytest.mark.parametrize("batch_size", [(), (2,)])
@pytest.mark.parametrize("name", ["ratio", "reward"])
def test_values_that_an_entrys_dtype_can_not_hold(
    zoo: Any, batch_size: tuple[int, ...], name: str
) -> None:
    whole = torch.ones(*batch_size, 1, dtype=torch.int64)

    class Halving(zoo.Counter):  # type: ignore[misc]
        steps = 0

        def __init__(self) -> None:
            super().__init__(batch_size=batch_size)
            spec = zoo.Unbounded((*batch_size, 1), dtype=torch.int64)
            self.observation_spec["ratio"] = spec
            self.reward_spec = spec.clone()

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
            return super()._reset(tensordict, **kwargs).set("ratio", whole)

        def _step(self, tensordict: Any) -> Any:
            self.steps += 1
            following = super()._step(tensordict).set("ratio", whole).set("reward", 2.0 * whole)
            return following.set(name, whole / 2) if self.steps == 5 else following

    with (
        dc.SyncDataCollector(Halving, frames_per_batch=12) as collector,
        pytest.raises(dc.EnvError, match=f"'{name}' has values of float32 that can't be written"),
    ):
        collector.next()
