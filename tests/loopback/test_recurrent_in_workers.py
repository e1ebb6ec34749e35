"""Recurrent policies in workers that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.loopback_pool import loopback_collector
from helpers.recurrent_policies import (
    LENGTHS,
    Counter,
    N,
    T,
    check,
    counting_with_tensordict,
)
from tensordict import TensorDict


@pytest.mark.parametrize("maker", [counting_with_tensordict, Counter])
def test_through_workers(maker: Callable[[], Any]) -> None:
    envs = CountingMaker("plain", 1, lengths=LENGTHS)
    settings = {"frames_per_batch": 2 * N * T, "envs_per_worker": N, "num_workers": 2, "sync": True}
    with loopback_collector(envs, maker(), **settings) as started:
        for _ in range(3):
            check(started.next(timeout_s=60))


def test_a_learned_start_is_that_of_the_newest_weights() -> None:
    policy = Counter()
    envs = CountingMaker("plain", 1, lengths=LENGTHS)
    with loopback_collector(
        envs, policy, frames_per_batch=N * T, envs_per_worker=N, num_workers=1, sync=True
    ) as collector:
        collector.next(timeout_s=60)
        with torch.no_grad():
            policy.first.fill_(5)
        collector.update_policy_weights_()
        collector.next(timeout_s=60)
        batch = collector.next(timeout_s=60)
    starts = batch["observation"][..., 2] == 0
    assert starts.any()
    assert (batch["frames"][starts] == 5).all()


class Leaning(Counter):
    """Acts by all observations of the episode."""

    def forward(self, observation: Any, frames: Any, total: Any, is_init: Any) -> Any:
        _, written = super().forward(observation, frames, total, is_init)
        noise = torch.randn_like(frames)
        return (written["total"][:, 2] + 0.1 * noise > 0).long(), written


def test_the_same_on_any_number_of_workers() -> None:
    def collected(num_workers: int) -> TensorDict:
        settings = {"num_workers": num_workers, "envs_per_worker": 4 // num_workers, "sync": True}
        with loopback_collector(
            "CartPole-v1", Leaning(), frames_per_batch=4 * 40, **settings
        ) as collector:
            collector.set_seed(2)
            batches = [collector.next(timeout_s=60) for _ in range(2)]
            return torch.cat(batches, 1).exclude("collector")

    expected = collected(1)
    assert expected["next", "done"].sum() > 4
    for num_workers in (2, 4):
        assert (collected(num_workers) == expected).all()
