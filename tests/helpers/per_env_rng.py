"""Stochastic policies of every kind, and the frames collected with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn


def chances(observation: torch.Tensor) -> torch.Tensor:
    """Of actions 0 and 1, ``[n, 2]``; no operation's rounding depends on n."""
    right = (observation[:, 2] * 2 + 0.5).clamp(0.1, 0.9)
    return torch.stack([1 - right, right], -1)


def categorical(observation: torch.Tensor) -> d.Distribution:
    return d.Categorical(chances(observation))


class Dropping(nn.Module):
    """Draws before it returns a distribution, which is drawn from then."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, observation: torch.Tensor) -> d.Distribution:
        return d.Bernoulli(chances(self.dropout(observation))[:, 1])


def drawing(observation: torch.Tensor) -> Any:
    """Draws by itself, in several ways."""
    weights = chances(observation)
    usual = torch.multinomial(weights, 1).squeeze(-1)
    coin = torch.bernoulli(weights[:, 1])
    explore = torch.rand(len(weights)) < 0.3
    action = torch.where(explore, torch.randint(2, (len(weights),)), usual)
    return action, {"coin": coin, "noise": torch.randn_like(observation)}


def tensordict_policy() -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(chances, in_keys=["observation"], out_keys=["probs"]),
        ProbabilisticTensorDictModule(
            in_keys=["probs"],
            out_keys=["action"],
            distribution_class=d.Categorical,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


POLICIES: dict[str, Callable[[], Any]] = {
    "distribution": lambda: categorical,
    "module": Dropping,
    "callable": lambda: drawing,
    "tensordict": tensordict_policy,
}


def collected(maker: Callable[..., Any], policy: str, num_workers: int, seed: int) -> TensorDict:
    """``[4, 60]`` of CartPole, from envs that are spread over ``num_workers``, 0 for none."""
    settings: dict[str, Any] = {"num_workers": num_workers, "sync": True} if num_workers else {}
    settings["envs_per_worker"] = 4 // (num_workers or 1)
    settings |= {"frames_per_batch": 4 * 30, "init_random_frames": 4 * 30}
    with maker("CartPole-v1", POLICIES[policy](), **settings) as collector:
        collector.set_seed(seed)
        batches = [collector.next(timeout_s=60) for _ in range(3)]
    return torch.cat(batches, 1).exclude("collector")


def same(batch: TensorDict, expected: TensorDict) -> bool:
    """Bit for bit, but for log-probabilities, whose rounding may depend on the batch's size."""
    name = "action_log_prob"
    if name in expected and not torch.allclose(batch[name], expected[name]):
        return False
    return bool((batch.exclude(name) == expected.exclude(name)).all())
