"""Noise per env: trajectories do not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.recurrent_policies import Counter
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn

import distcollect as dc


def chances(observation: torch.Tensor) -> torch.Tensor:
    """The probabilities of actions 0 and 1, ``[n, 2]``; no rounding depends on n."""
    right = (observation[:, 2] * 2 + 0.5).clamp(0.1, 0.9)
    return torch.stack([1 - right, right], -1)


class Dropping(nn.Module):
    """Draws random numbers itself, then returns a distribution to draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, observation: torch.Tensor) -> d.Distribution:
        return d.Bernoulli(chances(self.dropout(observation))[:, 1])


def drawing(observation: torch.Tensor) -> Any:
    """Draws random numbers itself, in several ways."""
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


class Leaning(Counter):
    """Acts by all observations of the episode."""

    def forward(self, observation: Any, frames: Any, total: Any, is_init: Any) -> Any:
        _, written = super().forward(observation, frames, total, is_init)
        noise = torch.randn_like(frames)
        return (written["total"][:, 2] + 0.1 * noise > 0).long(), written


def right(observation: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(observation), dtype=torch.int64)


def noisy() -> dc.EpsilonGreedy:
    """Explores less with each batch."""
    return dc.EpsilonGreedy(right, dc.LinearSchedule(1.0, 0.2, frames=4 * 90))


POLICIES: dict[str, Callable[[], Any]] = {
    "module": Dropping,
    "callable": lambda: drawing,
    "tensordict": tensordict_policy,
    "recurrent": Leaning,
    "noisy": noisy,
}


def collected(policy: str, num_workers: int, seed: int) -> TensorDict:
    """``[4, 60]`` frames of CartPole; ``num_workers`` is 0 for a collector without workers."""
    maker = loopback_collector if num_workers else dc.SyncDataCollector
    settings: dict[str, Any] = {"num_workers": num_workers, "sync": True} if num_workers else {}
    settings["envs_per_worker"] = 4 // (num_workers or 1)
    settings |= {"frames_per_batch": 4 * 30, "init_random_frames": 4 * 30}
    with maker("CartPole-v1", POLICIES[policy](), **settings) as collector:
        collector.set_seed(seed)
        batches = [collector.next(timeout_s=60) for _ in range(3)]
    return torch.cat(batches, 1).exclude("collector")


def same(batch: TensorDict, expected: TensorDict) -> bool:
    """Equal bit for bit; log-probabilities may differ in rounding with the batch size."""
    name = "action_log_prob"
    if name in expected and not torch.allclose(batch[name], expected[name]):
        return False
    return bool((batch.exclude(name) == expected.exclude(name)).all())


@pytest.mark.parametrize("policy", POLICIES)
def test_trajectories_do_not_depend_on_the_number_of_workers(policy: str) -> None:
    expected = collected(policy, 0, seed=1)
    assert expected["next", "done"].sum() > 4
    starts = {tuple(row.flatten().tolist()) for row in expected["action"]}
    assert len(starts) == 4
    for num_workers in (1, 2, 4):
        assert same(collected(policy, num_workers, seed=1), expected)
    assert not same(collected(policy, 0, seed=2), expected)
