"""When policies are called in inference mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingEnv, CountingMaker
from helpers.policy_binding import bind, call, pick

import distcollect as dc


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: torch.full((len(x), 2), 0.5, requires_grad=True),
        lambda x: torch.full((len(x), 2), 0.5, dtype=torch.bfloat16),
        lambda x: torch.full((len(x), 2), 0.5, dtype=torch.float64),
        lambda x: (x[:, :2] * 0 + 0.5, {"h": x.to(torch.bfloat16)}),
        lambda x: (x[:, :2] * 0 + 0.5, {"h": x.clone().requires_grad_()}),
    ],
    ids=["needs grad", "bfloat16", "float64", "bfloat16 extra", "extra needs grad"],
)
def test_unusual_tensors_from_a_policy(policy: Any) -> None:
    maker = CountingMaker(action="box")
    with dc.SyncDataCollector(maker, policy, frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["action"].dtype == torch.float32
    assert (batch["action"] == 0.5).all()
    assert not batch["action"].requires_grad
    if "h" in batch.keys():  # noqa: SIM118 - a TensorDict's own "in" looks at values
        assert not batch["h"].requires_grad
        assert torch.equal(batch["h"], batch["observation"].to(batch["h"].dtype))


def test_a_policy_may_change_its_input() -> None:
    """A policy that changes its input does not change the batch."""

    def policy(x: torch.Tensor) -> torch.Tensor:
        action = pick(x)
        x.fill_(-1)
        return action

    with dc.SyncDataCollector(partial(CountingEnv, 3), policy, frames_per_batch=20) as collector:
        batch = collector.next()
    assert (batch["observation"][:, 0] == 3).all()
    assert torch.equal(batch["action"], pick(batch["observation"]))


def test_a_policy_may_take_its_input_apart() -> None:
    def policy(observation: dict[str, Any]) -> torch.Tensor:
        return observation.pop("inner").pop("echo") % 5

    call(policy, "dict")


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_gets_inference_mode_and_a_shared_policy_never(shared: bool) -> None:
    """Any call of a shared one may be the one that keeps a tensor, for training."""
    modes = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        modes.append(torch.is_inference_mode_enabled())
        return pick(observation)

    bound, _ = bind(policy, shared=shared)
    bound.try_out()
    with bound.exploring():
        bound()
    assert modes == [not shared] * 2
    assert torch.is_grad_enabled()


def test_a_copy_that_computes_gradients_is_called_without_inference_mode() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            action = torch.zeros(len(observation), requires_grad=True)
            (slope,) = torch.autograd.grad((3 * action).sum(), action)
        return slope.long()

    bound, _ = bind(policy)
    assert (bound.try_out()[0] == 3).all()
    with bound.exploring():
        assert (bound()[0][0] == 3).all()
