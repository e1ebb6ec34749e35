"""Scalars of numpy and torch are numbers, and become Python's, so that states can be stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distcollect as dc

KINDS: dict[str, Callable[[Any], Any]] = {
    "int64": np.int64,
    "array": np.array,
    "tensor": torch.tensor,
}

NUMBERS = {
    "frames_per_batch": 8,
    "total_frames": 24,
    "envs_per_worker": 2,
    "max_frames_per_traj": 3,
    "init_random_frames": 8,
    "trajs_per_batch": 1,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NUMBERS)
def test_arguments(name: str, kind: str) -> None:
    given = {"frames_per_batch": 8, name: KINDS[kind](NUMBERS[name])}
    with dc.SyncDataCollector("CartPole-v1", **given) as collector:
        collector.next()
        state = collector.state_dict()
        assert json.loads(json.dumps(state)) == state
        assert type(getattr(collector, name, 0)) is int


@pytest.mark.parametrize("kind", [*KINDS, "float32"])
@pytest.mark.parametrize(
    "settings",
    [dc.Faults(), dc.Staleness(2), dc.EvaluationWorkers(), dc.Monitor(), dc.WeightSync()],
)
def test_settings(settings: Any, kind: str) -> None:
    """Each number of a dataclass becomes the Python number that it is."""
    numbers = {
        each.name: value
        for each in dataclasses.fields(settings)
        if isinstance(value := getattr(settings, each.name), int | float)
        and not isinstance(value, bool)
        and (isinstance(value, float) or kind != "float32")
    }
    convert = np.float32 if kind == "float32" else KINDS[kind]
    given = {name: convert(value) for name, value in numbers.items()}
    made = dataclasses.replace(settings, **given)
    for name, value in numbers.items():
        assert getattr(made, name) == value
        assert type(getattr(made, name)) in (int, float)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_episodes_and_workers(kind: str, tmp_path: Path) -> None:
    number = KINDS[kind]
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=8) as collector:
        expected = collector.set_seed(3)
        assert collector.set_seed(number(3), number(False)) == expected
        assert collector.state_dict()["seed"] == (3, False)
        assert [type(each) for each in collector.state_dict()["seed"]] == [int, bool]
        assert len(collector.evaluate(number(2), seed=number(4)).returns) == 2
        for ids in (number(0), [number(0)], number([0])):
            assert collector.call("render_mode", worker_ids=ids, timeout_s=number(9)) == {0: [None]}
        assert collector.next(number(60)).shape == (8,)
        dc.Checkpoint(tmp_path / "state.pt", every_s=number(5), collector=collector).save()


@pytest.mark.parametrize("name", ["samples_per_insert", "min_size", "slack", "timeout_s"])
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_a_buffer(name: str, kind: str) -> None:
    class Buffer:
        def extend(self, data: Any) -> None: ...

        def sample(self) -> None: ...

    dc.RateLimited(Buffer(), **{"samples_per_insert": 1, name: KINDS[kind](2)})


def test_a_flag_and_a_list() -> None:
    with dc.SyncDataCollector(
        ["CartPole-v1"], frames_per_batch=[np.int64(8)], split_trajs=np.True_
    ) as collector:
        assert ("collector", "mask") in collector.next().keys(include_nested=True)


class Counter:
    """A part whose state is what it is told to be."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["state"]


class Strange:
    """What no file can be loaded with."""


def test_every_file_can_be_loaded_again(tmp_path: Path) -> None:
    """Also one that replaces a file that could."""
    path = tmp_path / "state.pt"
    dc.Checkpoint(path, counter=Counter(1), policy=nn.Linear(1, 1)).save()
    counter, policy = Counter(0), nn.Linear(1, 1)
    checkpoint = dc.Checkpoint(path, counter=counter, policy=policy)
    assert checkpoint.load()
    counter.state = Strange()
    with pytest.raises(dc.ArgumentTypeError, match="the state of counter could not be loaded"):
        checkpoint.save()
    assert dc.Checkpoint(path, counter=counter, policy=policy).load()
    assert counter.state == 1
