"""Recurrent policies that count, in every form a policy may have."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    TensorDictModule,
)
from torch import nn

N, T = 3, 10
LENGTHS = (3, 1, 4, 7)


class Counter(nn.Module):
    """Its state counts the frames of the episode from ``first`` on, and sums observations."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(first))

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {
            "frames": self.first.expand(num_envs),
            "total": torch.zeros(num_envs, 4, dtype=torch.float64),
        }

    def forward(self, observation: Any, frames: Any, total: Any, is_init: Any) -> Any:
        action = frames.long() % 5
        following = {"frames": frames + 1, "total": total + observation}
        return action, {"told": frames * 2, "flag": is_init.clone(), **following}


class Learned(nn.Module):
    """Episodes begin with its weight in the state; each frame tells the weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"age": torch.zeros(num_envs), "began": self.weight.expand(num_envs)}

    def forward(self, observation: Any, age: Any, began: Any) -> Any:
        action = torch.zeros(len(observation), dtype=torch.int64)
        now = self.weight.expand(len(age))
        return action, {"age": age + 1, "began": began, "now": now}


def check_starts(frames: TensorDict) -> None:
    """In ``frames`` of :class:`Learned` episodes begin, from the weights of then."""
    starts = frames["age"] == 0
    assert starts.any()
    assert torch.equal(frames["began"][starts], frames["now"][starts])


def counting_with_tensordict() -> TensorDictModule:
    def step(observation: Any, frames: Any) -> Any:
        return frames.long().squeeze(-1) % 5, frames * 2, frames + 1

    module = TensorDictModule(
        step, in_keys=["observation", "frames"], out_keys=["action", "told", ("next", "frames")]
    )
    module.initial_state = lambda num_envs: {"frames": torch.zeros(num_envs, 1)}
    return module


def check(batch: TensorDict, first: float = 0.0) -> None:
    """The counters in ``batch`` agree with its observations."""
    step = batch["observation"][..., 2]  # of the episode
    assert torch.equal(batch["frames"].reshape(step.shape), step + first)
    assert torch.equal(batch["next", "frames"].reshape(step.shape), step + first + 1)
    assert torch.equal(batch["told"], 2 * batch["frames"])
    assert torch.equal(batch["action"], batch["frames"].reshape(step.shape).long() % 5)
    if "is_init" in batch:
        assert batch["is_init"].shape == (*step.shape, 1)
        assert torch.equal(batch["is_init"].squeeze(-1), step == 0)
        assert torch.equal(batch["is_init"], batch["flag"])
        assert not batch["next", "is_init"].any()
    if "total" in batch:
        assert batch["total"].dtype == torch.float64
        assert torch.equal(batch["next", "total"], batch["total"] + batch["observation"])
        ongoing = ~batch["next", "done"][..., :-1, 0]
        assert torch.equal(
            batch["next", "total"][..., :-1, :][ongoing], batch["total"][..., 1:, :][ongoing]
        )
        assert not batch["total"][step == 0].any()
