"""Policies, weights and entries of frames that few have: right, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

import distcollect as dc


class Rising(gym.Env[Any, Any]):
    """The observation is the number of steps; an episode has five."""

    observation_space: Any = spaces.Box(0, 5, (1,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def observe(self) -> Any:
        return np.full(1, self.steps, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 1.0, self.steps == 5, False, {}


def of_dict(**others: spaces.Space[Any]) -> type[Rising]:
    class Of(Rising):
        observation_space = spaces.Dict({1: Rising.observation_space, **others})

        def observe(self) -> Any:
            return {
                1: super().observe(),
                **{name: space.sample() for name, space in others.items()},
            }

    return Of


def still(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(observation), 1)


class Keeping(nn.Module):
    """Returns by how much the observation has risen since the last call."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.keep, self.before = keep, torch.zeros(1, 1)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        risen = observation - self.before
        self.before = self.keep(observation)
        return risen


class OfTensorDicts:
    before = TensorDict({"observation": torch.zeros(1, 1)}, [1])

    def __call__(self, td: TensorDict) -> TensorDict:
        td["action"] = td["observation"] - self.before["observation"]
        self.before = td.copy()
        return td


@pytest.mark.parametrize(
    "policy",
    [
        Keeping(lambda observation: observation),
        Keeping(lambda observation: observation[:, :1].view(-1, 1)),
        Keeping(lambda observation: observation).double(),
        OfTensorDicts(),
    ],
    ids=["itself", "a view", "of another dtype", "a TensorDict"],
)
def test_what_a_policy_keeps_of_its_input_stays_as_it_was(policy: Any) -> None:
    with dc.SyncDataCollector(Rising, policy, frames_per_batch=12) as collector:
        batch = collector.next()
    assert batch["action"].flatten().tolist() == [0, 1, 1, 1, 1, -4, 1, 1, 1, 1, -4, 1]


def test_an_annotation_may_be_a_sentence() -> None:
    def policy(observation: "[n, 1], the steps") -> torch.Tensor:  # type: ignore  # noqa: F722, PGH003
        return still(observation)

    with dc.SyncDataCollector(Rising, policy, frames_per_batch=5) as collector:
        assert not collector.next()["action"].any()


@pytest.mark.parametrize(
    ("output", "name"),
    [
        (lambda x: (torch.distributions.Bernoulli(x[:, 0] * 0), {"action_log_prob": x}), None),
        (lambda x: (still(x), {("x", "y"): x, "x": x}), "x"),
        (lambda x: (still(x), {3: x, "3": x}), "3"),
    ],
)
def test_no_entry_replaces_another(output: Any, name: str | None) -> None:
    with pytest.raises(dc.PolicyError, match=f"{name or 'action_log_prob'}', a name that is taken"):
        dc.SyncDataCollector(Rising, output, frames_per_batch=5)


class Ring:
    def extend(self, frames: TensorDict) -> torch.Tensor:
        return torch.arange(len(frames))

    def __getitem__(self, index: Any) -> Any: ...


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("policy_version", {"track_policy_version": True}),
        ("index", {"replay_buffer": dc.Prioritized(Ring())}),
    ],
)
def test_no_entry_of_the_env_is_replaced(name: str, options: dict[str, Any]) -> None:
    env = of_dict(**{name: spaces.Discrete(2)})
    with pytest.raises(dc.ArgumentError, match=rf"frames have \['{name}'\]"):
        dc.SyncDataCollector(env, None, frames_per_batch=5, **options)


def test_names_of_entries_that_are_numbers() -> None:
    def policy(observation: dict[int, torch.Tensor]) -> torch.Tensor:
        return observation[1] + 0

    with dc.SyncDataCollector(of_dict(), policy, frames_per_batch=5) as collector:
        batch = collector.next()
    assert torch.equal(batch["action"], batch["1"])


def test_a_lazily_conjugated_extra() -> None:
    def policy(observation: torch.Tensor) -> Any:
        return still(observation), {"z": torch.complex(observation, observation + 1).conj()}

    with dc.SyncDataCollector(Rising, policy, frames_per_batch=5) as collector:
        assert collector.next()["z"].flatten()[2] == 2 - 3j


class Stateful(nn.Module):
    """Has a buffer whose elements are one in memory, and a state that is no tensor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("wide", torch.full((1,), value).expand(3))

    def get_extra_state(self) -> Any:
        return {"value": self.value}

    def set_extra_state(self, state: Any) -> None:
        self.value = state["value"]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return still(observation) + self.wide.sum()


@pytest.mark.parametrize("given", [Stateful(2), Stateful(2).state_dict()], ids=["module", "dict"])
def test_state_that_is_not_published(given: Any) -> None:
    policy = Stateful(1)
    with dc.SyncDataCollector(Rising, policy, frames_per_batch=5) as collector:
        with pytest.warns(UserWarning, match=r"\['_extra_state'\] .* is not published"):
            collector.update_policy_weights_(given)
        assert (collector.next()["action"] == 6).all()
    assert policy.value == 1


def test_a_factory_is_given_all_of_a_policys_state() -> None:
    made: list[Stateful] = []

    def factory() -> nn.Module:
        made.append(Stateful(1))
        made[-1].wide = made[-1].wide.clone()  # else torch can't load it
        return made[-1]

    with dc.SyncDataCollector(
        Rising, Stateful(3), policy_factory=factory, frames_per_batch=5
    ) as collector:
        assert (collector.next()["action"] == 9).all()
    assert made[0].value == 3
