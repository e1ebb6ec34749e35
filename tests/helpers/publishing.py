"""A policy that writes its weights into each frame, and collectors for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.envs import ProcessIdEnv
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.weights.updaters import UpdaterContext

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class Telling(nn.Module):
    """Writes the value of each of its weights into each frame."""

    def __init__(self, value: float = 0.0, num_floats: int = 300) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(num_floats, dtype=torch.float64))
        self.body = nn.Linear(4, 4)
        self.critic = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fill(value)

    def fill(self, value: float) -> Telling:
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        told = {name: t.double().mean().expand(n) for name, t in self.state_dict().items()}
        told = {name.replace(".", "_"): value for name, value in told.items()}
        return torch.zeros(n, dtype=torch.int64), told


NAMES = [name.replace(".", "_") for name in Telling().state_dict()]


def told(batch: TensorDict, row: int = 0) -> dict[str, float]:
    """The values of the weights in a row's last frame."""
    return {name: float(batch[name][row, -1]) for name in NAMES}


class Disturbed(dc.BroadcastUpdater):
    """Broadcasts; before the next payload is sent it calls ``disturb``, once.

    Attributes:
        groups: the workers of each broadcast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.disturb: Callable[[], Any] | None = None
        self.groups: list[tuple[int, ...]] = []

    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Any]:
        self.groups.append(tuple(peers))
        return super().sources(payload, peers)

    def send(self, payload: torch.Tensor) -> None:
        disturb, self.disturb = self.disturb, None
        if disturb is not None:
            disturb()
        super().send(payload)


class AsFromAfar(dc.TransportUpdater):
    """Sends as if all workers were on one other host.

    Attributes:
        relays_of: of each push, the relay of each worker that has one.
        has_begun: set when a push has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.relays_of: list[dict[int, int]] = []
        self.has_begun = threading.Event()

    def attach(self, context: UpdaterContext) -> None:
        super().attach(replace(context, shares_memory=lambda _: False))

    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Any]:
        sources = super().sources(payload, peers)
        self.relays_of.append(dict(self.relays))
        self.has_begun.set()
        return sources


def telling_workers(policy: nn.Module, num_workers: int, **kwargs: Any) -> dc.RPCDataCollector:
    """A collector with worker processes, in sync mode; see :func:`pids`."""
    frames = {"frames_per_batch": 4 * num_workers, "sync": True}
    return dc.RPCDataCollector(ProcessIdEnv, policy, num_workers=num_workers, **frames, **kwargs)


def pids(batch: TensorDict) -> dict[int, int]:
    """worker_id to the id of its process."""
    ids, pid = batch["collector", "worker_id"][:, -1], batch["observation"][:, -1, 0]
    return {int(i): int(p) for i, p in zip(ids, pid, strict=True)}


Collect = Callable[..., dc.RPCDataCollector]


@pytest.fixture
def collect() -> Iterator[Collect]:
    """Makes collectors whose workers are threads of this process."""
    opened: list[dc.RPCDataCollector] = []

    def make(policy: Any = None, *, num_workers: int = 2, **kwargs: Any) -> dc.RPCDataCollector:
        kwargs = {"sync": True, "frames_per_batch": 4 * num_workers, **kwargs}
        if not kwargs["sync"]:
            kwargs["frames_per_batch"] = 4
        policy = Telling() if policy is None else policy
        collector = loopback_collector(ProcessIdEnv, policy, num_workers=num_workers, **kwargs)
        opened.append(collector)
        return collector

    yield make
    for collector in opened:
        collector.shutdown()
