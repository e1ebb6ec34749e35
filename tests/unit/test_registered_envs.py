"""Env ids that the user registered, as workers get them."""

from __future__ import annotations

import threading

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from distcollect.envs.registered import pickled_registry, register_all
from distcollect.errors import ArgumentError


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    spec = EnvSpec("mine/Late-v0", entry_point=lambda: gym.make("CartPole-v1"))
    monkeypatch.setitem(gym.registry, spec.id, spec)
    return spec


def test_unknown_ids_are_registered(late: EnvSpec) -> None:
    registry = pickled_registry()
    del gym.registry[late.id]
    known = dict(gym.registry)
    register_all(registry)
    assert gym.registry.keys() - known.keys() == {late.id}
    assert gym.make("mine/Late-v0").observation_space.shape == (4,)
    assert all(gym.registry[env_id] is spec for env_id, spec in known.items())


def test_the_trainers_registration_counts(late: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gym.registry, late.id, EnvSpec(late.id, entry_point="a:B", kwargs={"x": 1}))
    registry = pickled_registry()
    gym.registry[late.id] = late
    register_all(registry)
    assert gym.registry[late.id].kwargs == {"x": 1}


def test_what_cannot_be_pickled(late: EnvSpec) -> None:
    lock = threading.Lock()
    late.entry_point = lambda: lock  # type: ignore[assignment,return-value]
    registry = pickled_registry(["CartPole-v1"])
    with pytest.raises(ArgumentError, match=r"registered as 'mine/Late-v0' can't be sent .*lock"):
        pickled_registry(["mine/Late-v0"])
    del gym.registry[late.id]
    register_all(registry)
    assert late.id not in gym.registry
    assert "CartPole-v1" in gym.registry
