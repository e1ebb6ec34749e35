"""Bad input that is refused before any process starts: one clear error each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from helpers.envs import SamplingEnv
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


Started = Callable[[], list[str]]
GOOD: dict[str, Any] = {"frames_per_batch": 12, "num_workers": 2, "envs_per_worker": 2}


def make(**settings: Any) -> dc.RPCDataCollector:
    settings = {"create_env_fn": SamplingEnv, "policy": None, **GOOD, **settings}
    create_env_fn, policy = settings.pop("create_env_fn"), settings.pop("policy")
    return dc.RPCDataCollector(create_env_fn, policy, **settings)


class Unsendable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        # Beside the calls in helpers/bad_calls.py.
        ({"frames_per_batch": 10, "sync": True}, ValueError, "=10 .*2 worker.*2 env.*8 or 12"),
        ({"frames_per_batch": 3, "sync": True}, ValueError, "frames_per_batch=3 .*: 4 would do"),
        ({"frames_per_batch": True}, TypeError, "frames_per_batch=True: must be a whole"),
        ({"total_frames": "100"}, TypeError, "total_frames='100': must be a whole number"),
        ({"create_env_fn": "CartPole-v99"}, ValueError, "CartPole-v99.*v1"),
        ({"create_env_fn": None}, TypeError, "create_env_fn=None: must be an env id"),
        ({"create_env_fn": []}, ValueError, "0 makers for 2 worker"),
        ({"policy": Unsendable()}, ValueError, "policy can't be sent.*lock.*policy_factory"),
        (
            {"policy": torch.nn.LazyLinear(2)},
            ValueError,
            "weight 'weight' has no shape yet.*call the policy once with an observation",
        ),
        ({"policy_factory": threading.Lock().acquire}, ValueError, "policy_factory can't be sent"),
        ({"storing_device": "cuda:99"}, ValueError, "storing_device='cuda:99': this process sees"),
        ({"models": {"a.b": nn.Linear(1, 1)}}, ValueError, "without dots"),
        ({"max_weight_update_interval": 0}, ValueError, "at least 1"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch=0: must be at least 1"),
        ({"preemptive_threshold": -0.1, "sync": True}, ValueError, "at least 0 and at most 1"),
        ({"batch_deadline_s": -1, "sync": True}, ValueError, "batch_deadline_s=-1: .*above 0"),
        ({"slurm_kwargs": {"time": 1}}, ValueError, "slurm_kwargs=.*-m distcollect run SCRIPT"),
    ],
)
def test_is_refused_before_any_process_starts(
    started: Started, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        make(**settings)
    assert isinstance(caught.value, dc.DistCollectError)
    assert started() == []


DEADLINES: list[tuple[Any, str]] = [
    (dc.Faults, "start_timeout_s"),
    (dc.Faults, "weights_timeout_s"),
    (dc.Faults, "step_timeout_s"),
    (dc.WeightSync, "ready_timeout_s"),
    (dc.EvaluationWorkers, "timeout_s"),
]


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_deadlines_that_make_no_sense(number: float) -> None:
    for make, name in DEADLINES:
        with pytest.raises(dc.ArgumentError, match=f"{name}=.*above 0 seconds, and at most 1e8"):
            make(**{name: number})
        make(**{name: 1e8})


@pytest.mark.parametrize("value", ["5", True, [1.0]])
def test_deadlines_that_are_no_numbers(value: object) -> None:
    for make, name in DEADLINES:
        with pytest.raises(dc.ArgumentTypeError, match=f"{name}=.*a number of seconds"):
            make(**{name: value})


TEXT, GRAPH = spaces.Text(5), spaces.Graph(spaces.Discrete(2), None)
SEQUENCE = spaces.Sequence(spaces.Discrete(2))


@pytest.mark.parametrize("space", [TEXT, GRAPH, SEQUENCE], ids=lambda s: type(s).__name__)
def test_spaces_of_a_known_id_are_refused_before_any_process_starts(
    started: Started, space: gym.Space
) -> None:
    gym.register("Unfit-v0", lambda: SamplingEnv(observation=space))
    try:
        with pytest.raises(dc.SpaceError, match=rf"{type(space).__name__}.*wrapper"):
            make(create_env_fn="Unfit-v0")
    finally:
        del gym.registry["Unfit-v0"]
    assert started() == []


def test_a_total_that_is_no_multiple_is_rounded_up_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="total_frames=10.*frames_per_batch=4.*12") as caught:
        collector = dc.SyncDataCollector(SamplingEnv, frames_per_batch=4, total_frames=10)
    assert caught[0].filename == __file__  # the warning points at the user's line
    with collector:
        assert sum(batch.numel() for batch in collector) == 12 == collector.total_frames
