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
        ({"frames_per_batch": 10, "sync": True}, ValueError, "=10 .*2 worker.*2 env.*8 or 12"),
        ({"frames_per_batch": 3, "sync": True}, ValueError, "frames_per_batch=3 .*: 4 would do"),
        ({"frames_per_batch": 7}, ValueError, "frames_per_batch=7 .*6 or 8 would do"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch=0: must be at least 1"),
        ({"frames_per_batch": -4}, ValueError, "frames_per_batch=-4: must be at least 1"),
        ({"frames_per_batch": 2.5}, TypeError, "frames_per_batch=2.5: must be a whole number"),
        ({"frames_per_batch": True}, TypeError, "frames_per_batch=True: must be a whole"),
        ({"total_frames": 0}, ValueError, "total_frames=0: must be at least 1, or -1"),
        ({"total_frames": -2}, ValueError, "total_frames=-2: must be at least 1, or -1"),
        ({"total_frames": "100"}, TypeError, "total_frames='100': must be a whole number"),
        ({"num_workers": 0}, ValueError, "num_workers=0: must be at least 1"),
        ({"num_workers": -1}, ValueError, "num_workers=-1: must be at least 1"),
        ({"envs_per_worker": 0}, ValueError, "envs_per_worker=0: must be at least 1"),
        ({"envs_per_worker": "2"}, TypeError, "envs_per_worker='2': must be a whole number"),
        ({"max_frames_per_traj": 0}, ValueError, "max_frames_per_traj=0: must be at least 1"),
        ({"init_random_frames": -5}, ValueError, "init_random_frames=-5: .*0 or more"),
        ({"create_env_fn": "CartPoel-v1"}, ValueError, "CartPoel.*CartPole"),
        ({"create_env_fn": "CartPole-v99"}, ValueError, "CartPole-v99.*v1"),
        ({"create_env_fn": "nomod:CartPole-v1"}, ValueError, "nomod.*module:id"),
        ({"create_env_fn": 5}, TypeError, "create_env_fn=5: must be an env id or a callable"),
        ({"create_env_fn": None}, TypeError, "create_env_fn=None: must be an env id"),
        ({"create_env_fn": SamplingEnv()}, ValueError, "is an env .*callable that makes one"),
        (
            {"create_env_fn": [SamplingEnv] * 3},
            ValueError,
            "3 makers for 2 worker.*envs_per_worker",
        ),
        ({"create_env_fn": []}, ValueError, "0 makers for 2 worker"),
        ({"policy": Unsendable()}, dc.PolicyNotSendable, "lock.*policy_factory"),
        ({"policy": Unsendable()}, ValueError, "policy can't be sent"),
        ({"policy": 5}, TypeError, "policy=5: must be a module"),
        (
            {"policy": torch.nn.LazyLinear(2)},
            ValueError,
            "weight 'weight' has no shape yet.*call the policy once with an observation",
        ),
        ({"policy_factory": 5}, TypeError, "policy_factory=5: must be a callable"),
        ({"policy_factory": threading.Lock().acquire}, ValueError, "policy_factory"),
        ({"create_env_fn": threading.Lock().acquire}, ValueError, "create_env_fn can't be sent"),
        ({"device": "toaster"}, ValueError, "device='toaster'"),
        ({"exploration_type": "wild"}, ValueError, "'wild'.*'random'.*'deterministic'"),
        ({"cat_results": 3}, ValueError, "cat_results=3: use 0, -1 or 'stack'"),
        ({"cat_results": "stack"}, ValueError, "cat_results='stack' is for sync=True"),
        ({"storing_device": "toaster"}, ValueError, "storing_device='toaster'"),
        ({"storing_device": "cuda:99"}, ValueError, "storing_device='cuda:99': this process sees"),
        ({"postproc": 5}, TypeError, "postproc=5: must be a callable"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch=0: must be at least 1"),
        ({"trajs_per_batch": 2, "split_trajs": True}, ValueError, "both given"),
        ({"trajs_per_batch": 2, "set_truncated": True}, ValueError, "drop one of them"),
        ({"replay_buffer": 5}, TypeError, "replay_buffer=5: must have a method extend"),
        (
            {"frames_per_bach": 5},
            TypeError,
            r"'frames_per_bach' \(did you mean 'frames_per_batch'.*there are: auto_reg",
        ),
        ({"launcher": "submitit"}, ValueError, "launcher='submitit'.*torchrun or SLURM"),
        ({"slurm_kwargs": {"time": 1}}, ValueError, "slurm_kwargs=.*-m distcollect run SCRIPT"),
        ({"reset_when_done": False}, ValueError, "envs are always reset"),
        ({"backend": "mpi"}, ValueError, "backend='mpi': use 'gloo' or 'nccl'"),
    ],
)
def test_is_refused_before_any_process_starts(
    started: Started, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        make(**settings)
    assert isinstance(caught.value, dc.DistCollectError)
    assert started() == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"frames_per_batch": 7}, ValueError, "=7 .*2 env.*6 or 8 would do"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch=0: must be at least 1"),
        ({"create_env_fn": "CartPoel-v1"}, ValueError, "CartPoel.*CartPole"),
        (
            {"create_env_fn": lambda: SamplingEnv(spaces.Text(5))},
            dc.SpaceError,
            "observation.*Text",
        ),
        ({"policy": 5}, TypeError, "policy=5: must be a module"),
        ({"policy": lambda observation: torch.zeros(2, 5)}, dc.PolicyError, r"\[2, 5\].*\[2\]"),
    ],
)
def test_is_refused_in_process_too(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = {"create_env_fn": SamplingEnv, "policy": None, **settings}
    create_env_fn, policy = settings.pop("create_env_fn"), settings.pop("policy")
    settings = {"frames_per_batch": 4, "envs_per_worker": 2, **settings}
    with pytest.raises(error, match=message):
        dc.SyncDataCollector(create_env_fn, policy, **settings)


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


def test_bad_thresholds_are_refused_before_anything_starts() -> None:
    for kwargs, told in (
        ({"preemptive_threshold": 1.5}, "at most 1"),
        ({"preemptive_threshold": -0.1}, "at least 0 and at most 1"),
        ({"batch_deadline_s": -1}, "above 0"),
    ):
        with pytest.raises(dc.ArgumentError, match=told):
            dc.RPCDataCollector(
                SamplingEnv, num_workers=3, frames_per_batch=60, sync=True, **kwargs
            )
    with pytest.raises(dc.ArgumentError, match="sync=True"):
        dc.RPCDataCollector(
            SamplingEnv, num_workers=3, frames_per_batch=60, preemptive_threshold=0.5
        )
    with pytest.raises(dc.ArgumentTypeError, match="a number"):
        dc.RPCDataCollector(
            SamplingEnv,
            num_workers=3,
            frames_per_batch=60,
            sync=True,
            preemptive_threshold="most",  # type: ignore[arg-type]
        )


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


def test_use_after_shutdown_in_process() -> None:
    collector = dc.SyncDataCollector(SamplingEnv, frames_per_batch=4)
    collector.shutdown()
    collector.shutdown()
    uses: tuple[Callable[[], Any], ...] = (
        collector.next,
        collector.update_policy_weights_,
        lambda: collector.set_seed(1),
    )
    for use in uses:
        with pytest.raises(dc.CollectorStateError, match="shut down"):
            use()
