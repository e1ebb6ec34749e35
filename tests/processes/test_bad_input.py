"""Bad input: one clear error each; before any process starts, or with every one reaped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.scripts.marked import Marked
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

Started = Callable[[], list[str]]
GOOD: dict[str, Any] = {"frames_per_batch": 12, "num_workers": 2, "envs_per_worker": 2}


class Env(gym.Env[Any, Any]):
    """An env with the spaces given."""

    def __init__(self, observation: gym.Space | None = None, action: gym.Space | None = None):
        self.observation_space = observation or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}


def make(**settings: Any) -> dc.RPCDataCollector:
    settings = {"create_env_fn": Env, "policy": None, **GOOD, **settings}
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
        ({"create_env_fn": Env()}, ValueError, "is an env .*callable that makes one"),
        ({"create_env_fn": [Env] * 3}, ValueError, "3 makers for 2 worker.*envs_per_worker"),
        ({"create_env_fn": []}, ValueError, "0 makers for 2 worker"),
        ({"policy": Unsendable()}, dc.PolicyNotSendable, "lock.*policy_factory"),
        ({"policy": Unsendable()}, ValueError, "policy can't be sent"),
        ({"policy": 5}, TypeError, "policy=5: must be a module"),
        ({"policy_factory": 5}, TypeError, "policy_factory=5: must be a callable"),
        ({"policy": nn.Identity(), "policy_factory": Env}, ValueError, "both given"),
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
            r"no argument 'frames_per_bach' \(did you mean 'frames_per_batch'\?\); there are: batch_d",
        ),
        ({"launcher": "submitit"}, ValueError, "launcher='submitit'.*torchrun or SLURM"),
        ({"compile_policy": True}, ValueError, "compile_policy=True makes no sense.*policy_fact"),
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
        ({"create_env_fn": lambda: Env(spaces.Text(5))}, dc.SpaceError, "observation.*Text"),
        ({"policy": 5}, TypeError, "policy=5: must be a module"),
        ({"policy": lambda observation: torch.zeros(2, 5)}, dc.PolicyError, r"\[2, 5\].*\[2\]"),
    ],
)
def test_is_refused_in_process_too(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = {"create_env_fn": Env, "policy": None, **settings}
    create_env_fn, policy = settings.pop("create_env_fn"), settings.pop("policy")
    settings = {"frames_per_batch": 4, "envs_per_worker": 2, **settings}
    with pytest.raises(error, match=message):
        dc.SyncDataCollector(create_env_fn, policy, **settings)


@pytest.mark.parametrize("number", [0, -1.0, float("nan")])
def test_deadlines_that_make_no_sense(number: float) -> None:
    with pytest.raises(dc.ArgumentError, match=r"batch_timeout_s=.*above 0"):
        dc.Faults(batch_timeout_s=number)


TEXT, GRAPH = spaces.Text(5), spaces.Graph(spaces.Discrete(2), None)
SEQUENCE = spaces.Sequence(spaces.Discrete(2))


@pytest.mark.parametrize("space", [TEXT, GRAPH, SEQUENCE], ids=lambda s: type(s).__name__)
def test_spaces_of_a_known_id_are_refused_before_any_process_starts(
    started: Started, space: gym.Space
) -> None:
    gym.register("Unfit-v0", lambda: Env(observation=space))
    try:
        with pytest.raises(dc.SpaceError, match=rf"{type(space).__name__}.*wrapper"):
            make(create_env_fn="Unfit-v0")
    finally:
        del gym.registry["Unfit-v0"]
    assert started() == []


def test_a_total_that_is_no_multiple_is_rounded_up_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="total_frames=10.*frames_per_batch=4.*12") as caught:
        collector = dc.SyncDataCollector(Env, frames_per_batch=4, total_frames=10)
    assert caught[0].filename == __file__  # it points at the user's line
    with collector:
        assert sum(batch.numel() for batch in collector) == 12 == collector.total_frames


# From here on processes start, and are reaped.


def broken_maker() -> Env:
    raise OSError("no licence for the simulator")


def not_an_env() -> object:
    return object()


def unfit(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda observation: torch.zeros(shape, dtype=dtype)


def broken_factory() -> nn.Module:
    raise OSError("no checkpoint")


def broken_policy(observation: torch.Tensor) -> torch.Tensor:
    raise IndexError("not like this")


def box() -> Env:
    return Env(action=spaces.Box(-1, 1, (3,), np.float32))


@pytest.mark.parametrize(
    ("settings", "error", "message", "remote"),
    [
        ({"create_env_fn": broken_maker}, dc.EnvError, "env 0.*OSError.*no licence", "broken_m"),
        ({"create_env_fn": not_an_env}, dc.EnvError, "env 0.*object", ""),
        ({"create_env_fn": lambda: Env(TEXT)}, dc.SpaceError, "Text.*wrapper", ""),
        (
            {"policy": unfit((2, 5), torch.int64)},
            dc.PolicyError,
            r"shape \[2, 5\].*int64.*Discrete\(2\).*shape \[2\].*int64",
            "",
        ),
        (
            {"policy": unfit((2, 3), torch.int64), "create_env_fn": box},
            dc.PolicyError,
            r"dtype int64.*Box.*dtype float32",
            "",
        ),
        ({"policy": broken_policy}, dc.PolicyError, "IndexError.*not like this", "broken_policy"),
        ({"policy_factory": broken_factory}, dc.PolicyError, "OSError.*no checkp", "broken_fact"),
    ],
    ids=["maker", "no env", "space", "shape", "dtype", "policy", "factory"],
)
def test_is_found_by_a_workers_probe(
    marked: Marked,
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    remote: str,
) -> None:
    with pytest.raises(error, match=message) as caught:
        make(**{**settings, "num_workers": 1})
    if isinstance(caught.value, dc.WorkerError):
        assert caught.value.worker_id == 0
        assert remote in caught.value.remote_traceback
    assert not marked.left()


def test_other_versions_on_a_worker(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker's own interpreter says so: a sitecustomize alters what its torch reports."""
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, sys\n"
        "real = builtins.__import__\n"
        "def altered(name, *args, **more):\n"
        "    module = real(name, *args, **more)\n"
        "    if name.startswith('distcollect') and 'torch' in sys.modules:\n"
        "        sys.modules['torch'].__version__ = '1.13.1'\n"
        "    return module\n"
        "builtins.__import__ = altered\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(dc.WorkerMismatch, match=rf"torch is 1\.13.*trainer's is {mine}") as caught:
        make(num_workers=1)
    assert caught.value.worker_id == 0
    assert not marked.left()


def test_misuse_of_a_running_collector(marked: Marked) -> None:
    collector = make(sync=True)
    try:
        before = set(marked.pids())
        with pytest.raises(dc.CollectorStateError, match=r"another collector is open.*shutdown"):
            make()
        assert set(marked.pids()) == before

        ids: tuple[Any, ...] = (2, -1, [0, 2], [0, 0], [], True, "0", [0.0], slice(5, 9))
        for worker_ids in ids:
            with pytest.raises((dc.ArgumentError, dc.ArgumentTypeError), match="worker_ids="):
                collector.update_policy_weights_(nn.Linear(1, 1), worker_ids=worker_ids)
        assert collector.next().numel() == 12
    finally:
        collector.shutdown()
    assert not marked.left()
    uses: tuple[Callable[[], Any], ...] = (
        collector.next,
        lambda: next(iter(collector)),
        lambda: collector.update_policy_weights_(nn.Linear(1, 1)),
        lambda: collector.set_seed(1),
    )
    for use in uses:
        with pytest.raises(dc.CollectorStateError, match="shut down"):
            use()
    collector.shutdown()
    with make(num_workers=1) as another:  # one after the other is fine
        another.next()
    assert not marked.left()


def test_use_after_shutdown_in_process() -> None:
    collector = dc.SyncDataCollector(Env, frames_per_batch=4)
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
