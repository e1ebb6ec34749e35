"""How much Python a step, a rollout and a push do; a clock can't tell that on a busy machine.

The numbers are those of the tested versions. A change that alters one says so in its commit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.work import TensorOperations, Work, work_of
from torch import nn

import distcollect as dc
from distcollect.pool.policy_lag import count_lags
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout
from distcollect.rollout.slabs import new_slab
from distcollect.rollout.spaces import Leaf
from distcollect.transport.copying import Copier, PeerMemory

_PINS = (Path(__file__).parents[2] / "constraints" / "tested.txt").read_text().splitlines()
_DIFFERENT = [
    name
    for name in ("torch", "tensordict", "gymnasium")
    if f"{name}=={version(name).partition('+')[0]}" not in _PINS
]
pytestmark = pytest.mark.skipif(
    bool(_DIFFERENT) or sys.version_info[:2] != (3, 11),
    reason=f"the numbers are those of Python 3.11 and the tested versions; differs: {_DIFFERENT}",
)

T = 32
# Of several threads: when each of them wakes up changes what it does.
TOLERANCE, THREADS_TOLERANCE = 0.02, 0.2


class Endless(gym.Env):
    """One episode that never ends: each step does the same."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Policy(nn.Module):
    def __init__(self, *, returns: str) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.returns = returns

    def forward(self, observation):
        logits = self.net(observation)
        if self.returns == "distribution":
            return torch.distributions.Categorical(logits=logits, validate_args=False)
        return logits.argmax(-1)


def check(did: Work, expected: Work, tolerance: float) -> None:
    for name in Work._fields:
        limit = pytest.approx(getattr(expected, name), rel=tolerance, abs=1)
        assert getattr(did, name) == limit, f"{name}: {did} instead of {expected}"


def one_more(run: Callable[[int], object], few: int, many: int, threads: str = "") -> Work:
    """The work of one more of what ``run`` does so often."""
    for number in (few, many):
        run(
            number
        )  # what is done once in a process, such as the layout of a rollout of so many steps
    first, second = (work_of(lambda n=n: run(n), threads=threads) for n in (few, many))
    return first.per(second, many - few)


@pytest.mark.parametrize(
    ("num_envs", "returns", "expected", "operations"),
    [
        (1, "tensor", Work(11, 7, 508), 4),
        (16, "tensor", Work(11, 7, 1198), 4),
        (1, "distribution", Work(16, 10, 691), 16),
        (16, "distribution", Work(16, 10, 1381), 16),
    ],
)
def test_a_step_in_this_process(
    num_envs: int, returns: str, expected: Work, operations: int
) -> None:
    def collect(num_steps: int) -> None:
        with dc.SyncDataCollector(
            Endless, Policy(returns=returns), frames_per_batch=num_envs * num_steps,
            envs_per_worker=num_envs,
        ) as collector:  # fmt: skip
            collector.next()

    def operations_of(num_steps: int) -> int:
        with TensorOperations() as counted:
            collect(num_steps)
        return counted.count

    check(one_more(collect, T, 2 * T), expected, TOLERANCE)
    assert (operations_of(2 * T) - operations_of(T)) / T == operations


def collect_with(num_batches: int, num_workers: int, *, push: bool = False) -> None:
    policy = Policy(returns="tensor")
    with loopback_collector(
        Endless, policy, frames_per_batch=T * num_workers, num_workers=num_workers, sync=True
    ) as collector:
        for _ in range(num_batches):
            collector.next()
            if push:
                collector.update_policy_weights_(policy)


@pytest.mark.parametrize(
    ("threads", "num_workers", "expected"),
    [
        pytest.param("distcollect", 1, Work(203, 145, 5050), id="trainer, a batch of one rollout"),
        pytest.param(
            "distcollect", 8, Work(500, 320, 11235), id="trainer, a batch of eight rollouts"
        ),
        pytest.param("worker", 1, Work(650, 433, 23140), id="trainer and a worker, a batch of one"),
    ],
)
def test_a_batch_of_workers(threads: str, num_workers: int, expected: Work) -> None:
    check(
        one_more(lambda n: collect_with(n, num_workers), 10, 30, threads),
        expected,
        THREADS_TOLERANCE,
    )


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        pytest.param("distcollect", Work(498, 440, 12052), id="trainer"),
        pytest.param("worker", Work(822, 570, 26850), id="trainer's own thread and a worker"),
    ],
)
def test_a_batch_and_a_push(threads: str, expected: Work) -> None:
    check(
        one_more(lambda n: collect_with(n, 1, push=True), 10, 30, threads),
        expected,
        THREADS_TOLERANCE,
    )


@pytest.mark.parametrize("num_envs", [1, 16])
def test_a_rollout_in_shared_memory_becomes_a_batch(num_envs: int) -> None:
    """A worker on the trainer's host: one copy of each leaf, and what is rebuilt."""
    observation = Leaf(("observation",), (4,), torch.float32)
    layout = Layout((num_envs,), (observation,), (Leaf(("action",), (), torch.int64),))
    slab = new_slab(layout, T, shared=True)
    slab.traj_ids.fill(0)
    num_frames = num_envs * T
    header = Header(0, 0, 0, num_frames, T, num_frames, (0, 0), wire_form=slab.wire_form)
    memory, copied = PeerMemory(), []

    def assembled() -> None:
        Copier().deliver(0, memory, slab.tensors(), lambda tensors, _: copied.append(tensors))
        rollouts = [Rollout(header, copied.pop())]
        batch = assemble(layout, rollouts, shape=(num_envs, T))
        count_lags(batch, rollouts, lambda *_: 0, lambda _: 0)

    assembled()  # maps the memory
    with TensorOperations() as counted:
        assembled()
    assert counted.count == 17
    check(work_of(assembled), Work(61, 72, 2123), TOLERANCE)
