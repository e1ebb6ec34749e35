"""Bad input that is found in workers: one clear error each, and every process is reaped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from helpers.envs import SamplingEnv, StumblingEnv
from helpers.marked import Marked
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


GOOD: dict[str, Any] = {"frames_per_batch": 12, "num_workers": 2, "envs_per_worker": 2}


def make(**settings: Any) -> dc.RPCDataCollector:
    settings = {"create_env_fn": SamplingEnv, "policy": None, **GOOD, **settings}
    create_env_fn, policy = settings.pop("create_env_fn"), settings.pop("policy")
    return dc.RPCDataCollector(create_env_fn, policy, **settings)


TEXT = spaces.Text(5)


def broken_factory(*_: object) -> nn.Module:
    raise OSError("no checkpoint")


OTHER_SPACES = r"differ from the others': observation \[[37]\].* instead of .* equal spaces"
UNEQUAL = [SamplingEnv, lambda: SamplingEnv(spaces.Box(-1, 1, (7,)))]


@pytest.mark.parametrize(
    ("settings", "error", "message", "remote"),
    [
        ({"create_env_fn": lambda: SamplingEnv(TEXT)}, dc.SpaceError, "Text.*wrapper", ""),
        ({"policy_factory": broken_factory}, dc.PolicyError, "OSError.*no checkp", "broken_fact"),
        ({"init_fn": broken_factory}, dc.WorkerError, "init_fn raised OSError", "broken_fact"),
        ({"post_collect_hook": broken_factory}, dc.WorkerError, "hook raised OSEr", "broken_fact"),
        ({"frames_per_batch": 10**10}, dc.ArgumentError, "GB .*GB are free.*smaller frames_", ""),
        ({"create_env_fn": UNEQUAL, "num_workers": 2}, dc.WorkerMismatch, OTHER_SPACES, ""),
    ],
    ids=["space", "factory", "init_fn", "hook", "memory", "spaces"],
)
def test_is_found_by_a_workers_probe(
    marked: Marked,
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    remote: str,
) -> None:
    with pytest.raises(error, match=message) as caught, make(**{"num_workers": 1, **settings}) as c:
        c.next(timeout_s=60)
    assert type(caught.value) is error
    if isinstance(caught.value, dc.WorkerError):
        assert caught.value.worker_id in range(settings.get("num_workers", 1))
        assert remote in caught.value.remote_traceback
    assert not marked.left()


def test_other_versions_on_a_worker(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sitecustomize in the worker's interpreter changes the version of torch that is found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata\n"
        "real = importlib.metadata.version\n"
        "importlib.metadata.version = lambda name: '1.13.1' if name == 'torch' else real(name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mine = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(dc.WorkerMismatch, match=rf"torch is 1\.13.*trainer's is {mine}") as caught:
        make(num_workers=1)
    assert caught.value.worker_id == 0
    assert not marked.left()


def stumbles_in_worker_0(context: dc.EnvContext) -> gym.Env[Any, Any]:
    return StumblingEnv(SamplingEnv(), 20 if context.worker_id == 0 else None)


@pytest.mark.parametrize("sync", [True, False])
def test_the_first_exception_ends_the_run(sync: bool, marked: Marked) -> None:
    faults = dc.Faults(max_env_faults=0)
    collector = make(
        create_env_fn=stumbles_in_worker_0, sync=sync, total_frames=2400, faults=faults
    )
    # Though worker 1 could go on, and worker 0 could be replaced.
    with collector, pytest.raises(dc.EnvError, match=r"worker 0: .*stumbled"):
        for _ in collector:
            pass
    assert not marked.left()
