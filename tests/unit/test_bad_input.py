"""Bad input that is refused before any process starts, beside the calls in helpers/bad_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from helpers.envs import SamplingEnv
from torch import nn

import distcollect as dc

DEADLINES: list[tuple[Any, str]] = [
    (dc.Faults, "start_timeout_s"),
    (dc.Faults, "step_timeout_s"),
    (dc.WeightSync, "ready_timeout_s"),
    (dc.EvaluationWorkers, "timeout_s"),
]


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        *(
            (number, dc.ArgumentError, "above 0 seconds, and at most 1e8")
            for number in (0, -1.0, float("nan"), float("inf"), 1e300)
        ),
        *((value, dc.ArgumentTypeError, "a number of seconds") for value in ("5", True, [1.0])),
    ],
)
def test_deadlines_that_make_no_sense(number: Any, error: type[Exception], message: str) -> None:
    for make, name in DEADLINES:
        with pytest.raises(error, match=f"{name}=.*{message}"):
            make(**{name: number})
        make(**{name: 1e8})


def test_a_rollout_that_does_not_fit_into_memory() -> None:
    collector = dc.SyncDataCollector("CartPole-v1", None, frames_per_batch=10**10)
    with pytest.raises(dc.ArgumentError, match=r"takes .* GB .* GB are free on this host"):
        collector.next()
    collector.shutdown()


TEXT, GRAPH = spaces.Text(5), spaces.Graph(spaces.Discrete(2), None)
SEQUENCE = spaces.Sequence(spaces.Discrete(2))


def test_a_pattern_to_exclude_that_no_weight_has() -> None:
    with pytest.raises(dc.ArgumentError, match=r"exclude=\['critc.\*'\].* names: weight, bias"):
        dc.MultiSyncDataCollector(
            "CartPole-v1",
            nn.Linear(4, 2),
            frames_per_batch=8,
            num_workers=1,
            weight_sync=dc.WeightSync(exclude=["bias", "critc.*"]),
        )


@pytest.mark.parametrize("space", [TEXT, GRAPH, SEQUENCE], ids=lambda s: type(s).__name__)
def test_spaces_of_a_known_id_are_refused_before_any_process_starts(
    started: Callable[[], list[str]], space: gym.Space
) -> None:
    gym.register("Unfit-v0", lambda: SamplingEnv(observation=space))
    try:
        with pytest.raises(dc.SpaceError, match=rf"{type(space).__name__}.*wrapper"):
            dc.RPCDataCollector("Unfit-v0", frames_per_batch=12, num_workers=2)
    finally:
        del gym.registry["Unfit-v0"]
    assert started() == []
