"""Judge: pairs of arguments, each with each kind of replay buffer.

A pair either is refused before anything starts, or the run has exactly its frames: each that was
stepped reaches the user or the buffer once, or is among what is lost or masked. Batches
of a single frame, and those that are masked as a whole, included. Numbers may be scalars of numpy
or torch, and each state survives JSON and a file. From docs/semantics.md and docs/training.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from helpers.judge_callbacks import raised_by
from helpers.judge_pairs import BUFFERS, Marked, Numbered, stored
from hypothesis import strategies as st
from tensordict import TensorDict

import distcollect as dc

NUM_BATCHES = 4

# Two values of each, the first as if it were not given.
CHOICES: dict[str, list[Any]] = {
    "frames_per_batch": [12, 2],  # with two envs the second is a single frame of each
    "envs_per_worker": [1, 2],
    "split_trajs": [None, True],
    "trajs_per_batch": [None, 2],
    "traj_format": [None, "cat"],
    "set_truncated": [False, True],
    "compact_obs": [False, True],
    "track_traj_ids": [True, False],
    "track_policy_version": [False, True],
    "reset_at_each_iter": [False, True],
    "max_frames_per_traj": [None, 2],
    "init_random_frames": [None, 3],
    "postproc": [None, lambda batch: batch],
    "extend_buffer": [True, False],
    "storing_device": [None, "cpu"],
}
PAIRS = [
    {one: CHOICES[one][1], other: CHOICES[other][1]}
    for one, other in itertools.combinations(CHOICES, 2)
]
OF_WORKERS: dict[str, list[Any]] = {
    "staleness": [None, dc.Staleness(0, mode="mask"), dc.Staleness(0, mode="drop")],
    "sync": [False, True],
    "cat_results": [0, "stack", -1],
    "preemptive_threshold": [None, 0.5],
    "batch_deadline_s": [None, 5.0],
    "reproducible": [False, True],
    "update_at_each_batch": [False, True],
}


def steps_of(data: TensorDict) -> list[tuple[int, int]]:
    """(env, step) of each frame that counts."""
    keys = data.keys(include_nested=True)
    if ("collector", "mask") in keys:
        data = data[data["collector", "mask"]]
    shown = data["shown"].reshape(-1, 2).long()
    return [tuple(pair) for pair in shown.tolist()]


def check_run(make: Callable[..., Any], log: Path, kind: str, given: dict[str, Any]) -> str:
    """Collect with these arguments; what came of it, in one word.

    The collector may only refuse them with an ArgumentError when it is made.
    """
    buffer = BUFFERS[kind]()
    log.unlink(missing_ok=True)
    arguments = {"frames_per_batch": 12, **given}
    if buffer is not None:
        arguments["replay_buffer"] = buffer
    collector, error = raised_by(
        lambda: make(
            lambda context: Numbered(log, context.worker_id, context.env_index), **arguments
        )
    )
    if error is not None:
        assert isinstance(error, dc.ArgumentError | dc.ArgumentTypeError), (given, error)
        assert not log.exists(), "refused after frames were stepped"
        return "refused"
    received: list[tuple[int, int]] = []
    with collector:
        for _ in range(NUM_BATCHES):
            batch = collector.next()
            assert (batch is None) == (buffer is not None)
            if batch is not None:
                received += steps_of(batch)
            if "staleness" in given:
                collector.update_policy_weights_()
    if buffer is not None:
        received = [step for data in stored(buffer) for step in steps_of(data)]
    stepped = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert len({*received}) == len(received), "a frame came twice"
    assert {*received} <= {*stepped}, "a frame was never stepped"
    lost = sum(collector.stats().lost.values())
    stale = sum(getattr(collector, "stale_frames", {}).values())
    if given.get("staleness") == dc.Staleness(0, mode="drop"):
        stale = 0  # these are among the lost
    kept = len(received) + lost + stale
    assert kept == len(stepped), (given, len(received), lost, stale, len(stepped))
    return "collected"


@pytest.mark.parametrize("kind", BUFFERS)
def test_in_process(kind: str, tmp_path: Path) -> None:
    _skip_without_torchrl(kind)

    def make(env: Any, **kwargs: Any) -> Any:
        return dc.SyncDataCollector(env, Marked(), **kwargs)

    found = [check_run(make, tmp_path / "log", kind, pair) for pair in PAIRS]
    assert {*found} == {"collected", "refused"}
    assert found.count("refused") < len(found) / 2


def _skip_without_torchrl(kind: str) -> None:
    if kind not in ("none", "own"):
        pytest.importorskip("torchrl", reason="the torchrl extra is not installed")


ALL = {**CHOICES, **OF_WORKERS}


@pytest.mark.parametrize("kind", BUFFERS)
def test_masked_as_a_whole(kind: str, tmp_path: Path) -> None:
    """What was collected ahead of newer weights is masked, and reaches no buffer."""
    _skip_without_torchrl(kind)
    given = {"staleness": dc.Staleness(0, mode="mask"), "sync": False, "frames_per_batch": 2}
    found = check_run(_with_workers, tmp_path / "log", kind, given)
    assert found == ("refused" if kind == "rows" else "collected")


@hypothesis.given(
    names=st.lists(st.sampled_from(sorted(ALL)), min_size=2, max_size=3, unique=True),
    kind=st.sampled_from(sorted(BUFFERS)),
    draws=st.data(),
)
def test_with_workers(tmp_path_factory: Any, names: list[str], kind: str, draws: Any) -> None:
    _skip_without_torchrl(kind)
    given = {name: draws.draw(st.sampled_from(ALL[name][1:]), label=name) for name in names}
    check_run(_with_workers, tmp_path_factory.mktemp("pair") / "log", kind, given)


def _with_workers(env: Any, **kwargs: Any) -> Any:
    return dc.RPCDataCollector(env, Marked(), num_workers=2, **kwargs)


NUMBERS: dict[str, Any] = {
    "frames_per_batch": 8,
    "total_frames": 24,
    "num_workers": 2,
    "envs_per_worker": 2,
    "max_frames_per_traj": 3,
    "init_random_frames": 8,
    "preemptive_threshold": 1.0,
    "batch_deadline_s": 100.0,
    "max_weight_update_interval": 2,
}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "faults": (dc.Faults, {"start_timeout_s": 90.0, "max_restarts": 2, "min_workers": 1}),
    "staleness": (dc.Staleness, {"max_policy_lag": 3}),
    "weight_sync": (dc.WeightSync, {"ready_timeout_s": 3.0}),
    "monitor": (dc.Monitor, {"every_s": 60.0}),
}


@pytest.mark.parametrize("scalar", [np.asarray, torch.tensor, lambda x: np.asarray(x)[()]])
def test_every_number_as_a_scalar(scalar: Callable[[Any], Any], tmp_path: Path) -> None:
    given = {name: scalar(number) for name, number in NUMBERS.items()}
    for name, (kind, numbers) in SETTINGS.items():
        given[name] = kind(**{key: scalar(number) for key, number in numbers.items()})
    with dc.RPCDataCollector("CartPole-v1", sync=True, **given) as collector:
        collector.set_seed(scalar(3), scalar(False))
        assert collector.next(scalar(100.0)).shape == (4, 2)
        assert (
            len(collector.evaluate(scalar(2), seed=scalar(1), timeout_s=scalar(99.0)).returns) == 2
        )
        assert [*collector.call("render_mode", worker_ids=scalar([0, 1]))] == [0, 1]
        assert [*collector.call("render_mode", worker_ids=[scalar(1)])] == [1]
        state = collector.state_dict()
        dc.Checkpoint(tmp_path / "state.pt", every_s=scalar(60.0), collector=collector).save()
    check_state(state, tmp_path)


def check_state(state: Any, folder: Path) -> None:
    """A state survives JSON, and a file that is read without running code."""
    assert tupled(json.loads(json.dumps(state))) == tupled(state)
    torch.save(state, folder / "alone.pt")
    assert torch.load(folder / "alone.pt", weights_only=True) == state


def tupled(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, dict):
        return {key: tupled(each) for key, each in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("given", [{}, {"trajs_per_batch": 1}, {"max_frames_per_traj": 2}])
@pytest.mark.parametrize("seed", [None, 3, np.int64(3), torch.tensor(3)], ids=str)
def test_states(seed: Any, given: dict[str, Any], tmp_path: Path) -> None:
    """Whichever way it travels, a state goes on as it does itself."""

    def made() -> Any:
        return dc.SyncDataCollector("CartPole-v1", frames_per_batch=8, **given)

    with made() as collector:
        if seed is not None:
            collector.set_seed(seed)
        collector.next()
        state = collector.state_dict()
        path = tmp_path / "state.pt"
        dc.Checkpoint(path, collector=collector).save()
    check_state(state, tmp_path)
    found = []
    for way in (state, json.loads(json.dumps(state)), None):
        with made() as collector:
            if way is None:
                assert dc.Checkpoint(path, collector=collector).load()
            else:
                collector.load_state_dict(way)
            after = collector.state_dict()
            check_state(after, tmp_path)
            found.append((collector.frames, after["seed"], collector.next()["action"].tolist()))
    if seed is not None:
        assert found[0] == found[1] == found[2]
    assert {frames for frames, _, _ in found} == {state["frames"]}
