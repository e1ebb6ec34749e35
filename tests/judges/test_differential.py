"""Judge: the same seed gives the same stream of frames and actions, whatever steps the envs.

In process, in the background, in one worker: of each generator (the env's own, torch's, numpy's and
Python's), and with each way to seed. From docs/training.md, "Reproducibility".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.judge_seeds import RandomEnv, RandomPolicy, differing
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc

T, NUM_BATCHES = 8, 3
RESUMED_FRAMES = 2 * T

WITH_WORKERS: dict[str, Any] = {
    "MultiSync": partial(dc.MultiSyncDataCollector, num_workers=1),
    "aSync": partial(dc.aSyncDataCollector, reproducible=True),
    "RPC, sync": partial(dc.RPCDataCollector, num_workers=1, sync=True),
    "RPC, reproducible": partial(dc.RPCDataCollector, num_workers=1, reproducible=True),
}

Seeding = Callable[[Any], object]


def _resume(collector: Any) -> None:
    """Continue a run with a seed that ended after some frames."""
    with dc.SyncDataCollector(RandomEnv, frames_per_batch=RESUMED_FRAMES) as before:
        before.set_seed(3)
        before.next()
        state = before.state_dict()
    collector.load_state_dict(json.loads(json.dumps(state)))


SEEDINGS: dict[str, Seeding] = {
    "a seed": lambda collector: collector.set_seed(3),
    "one for all envs": lambda collector: collector.set_seed(3, static_seed=True),
    "numpy's": lambda collector: collector.set_seed(np.int64(3)),
    "torch's": lambda collector: collector.set_seed(torch.tensor(3)),
    "two": lambda collector: [collector.set_seed(seed) for seed in (4, 3)],
    "resumed": _resume,
}


def disturbed() -> None:
    """Leave the generators of this process in another state than before."""
    torch.rand(3)
    np.random.random(5)  # noqa: NPY002
    random.random()


def made(kind: Any, num_envs: int, **kwargs: Any) -> Any:
    disturbed()
    return kind(
        RandomEnv,
        RandomPolicy(),
        frames_per_batch=T * num_envs,
        envs_per_worker=num_envs,
        **kwargs,
    )


def flat(batches: list[TensorDict]) -> list[TensorDict]:
    """As a replay buffer gets them: RPC's keep the dimension of rows."""
    return [batch.reshape(-1) for batch in batches]


def taken(collector: Any, seeding: Seeding) -> list[TensorDict]:
    seeding(collector)
    return flat([collector.next() for _ in range(NUM_BATCHES)])


def expected(num_envs: int, seeding: Seeding) -> list[TensorDict]:
    """What a new collector of this process gives."""
    with made(dc.SyncDataCollector, num_envs) as collector:
        return taken(collector, seeding)


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("name", SEEDINGS)
def test_in_process_twice(name: str, num_envs: int) -> None:
    """The judge itself: the reference repeats, and another seed gives other numbers."""
    first = expected(num_envs, SEEDINGS[name])
    assert differing(first, expected(num_envs, SEEDINGS[name])) == []
    others = differing(first, expected(num_envs, lambda collector: collector.set_seed(99)))
    assert {*others} >= {
        "action", "env_own", "env_numpy", "env_torch", "env_random", "policy_numpy", "policy_torch",
        "policy_random",
    }  # fmt: skip


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("name", SEEDINGS)
def test_in_the_background(name: str, num_envs: int) -> None:
    buffer = KeepingBuffer()
    total = T * num_envs * NUM_BATCHES + (RESUMED_FRAMES if name == "resumed" else 0)
    with made(
        dc.SyncDataCollector, num_envs, replay_buffer=buffer, total_frames=total
    ) as collector:
        SEEDINGS[name](collector)
        collector.start()
        eventually(lambda: not collector.is_running)
        collector.async_shutdown(timeout=60)
    assert differing(expected(num_envs, SEEDINGS[name]), buffer.added) == []


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_one_worker(kind: str, num_envs: int) -> None:
    """Of several seeds, each gives what it gives alone."""
    found = {}
    with made(WITH_WORKERS[kind], num_envs) as collector:
        for name, seeding in SEEDINGS.items():
            if name != "resumed":
                batches = taken(collector, seeding)
                found[name] = differing(expected(num_envs, seeding), batches)
    with made(WITH_WORKERS[kind], num_envs) as collector:
        batches = taken(collector, _resume)
    found["resumed"] = differing(expected(num_envs, _resume), batches)
    assert found == {name: [] for name in SEEDINGS}


def torchrl_env() -> Any:
    from torchrl.envs import GymWrapper  # noqa: PLC0415

    return GymWrapper(RandomEnv())


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("name", ["a seed", "one for all envs"])
def test_torchrl_envs(name: str, num_envs: int) -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    kwargs: dict[str, Any] = {"frames_per_batch": T * num_envs, "envs_per_worker": num_envs}
    disturbed()
    with dc.SyncDataCollector(torchrl_env, None, **kwargs) as collector:
        in_process = taken(collector, SEEDINGS[name])
    disturbed()
    with WITH_WORKERS["MultiSync"](torchrl_env, None, **kwargs) as collector:
        assert differing(in_process, taken(collector, SEEDINGS[name])) == []
    own = in_process[0]["env_own"].unflatten(0, (num_envs, T))
    assert torch.equal(own[0], own[-1]) == (num_envs == 1 or name == "one for all envs")
