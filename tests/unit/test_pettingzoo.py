"""PettingZoo's parallel envs: the keys of each group of agents, and agents that die early."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from helpers.pettingzoo_env import Lives
from tensordict.nn import TensorDictModule

import distcollect as dc

pettingzoo = pytest.importorskip("pettingzoo", reason="the pettingzoo extra is not installed")


def test_a_policy_that_writes_the_rewards_of_agents() -> None:
    keys: Any = {"in_keys": [("ant", "observation")]}
    keys["out_keys"] = [("ant", "action"), ("bee", "action"), ("ant", "reward")]

    def choose(seen: torch.Tensor) -> Any:
        num_envs = len(seen)
        bees = torch.zeros(num_envs, 1, dtype=torch.long)
        return torch.zeros(num_envs, 2, 3), bees, torch.ones(num_envs, 2, 1)

    with pytest.raises(dc.PolicyError, match=r"'ant\.reward', a name that is taken"):
        dc.SyncDataCollector(Lives, TensorDictModule(choose, **keys), frames_per_batch=4)


@pytest.mark.parametrize("kind", ["absent", "present"])
def test_actions_of_absent_agents_may_be_anything(kind: str) -> None:
    def act(ants: torch.Tensor, bees: torch.Tensor) -> Any:
        ants = ants if kind == "absent" else ~ants
        chosen = torch.zeros(*ants.shape, 3).masked_fill(~ants.unsqueeze(-1), torch.nan)
        return chosen, bees.long() - 1 + bees

    keys: Any = {"in_keys": [("ant", "mask"), ("bee", "mask")]}
    keys["out_keys"] = [("ant", "action"), ("bee", "action")]
    make = partial(dc.SyncDataCollector, Lives, TensorDictModule(act, **keys), frames_per_batch=9)
    if kind == "absent":
        with make() as collector:
            assert collector.next()["ant", "action"].isnan().any()
    else:
        with pytest.raises(dc.PolicyError, match=r"nan.* must return finite numbers"):
            make()


def test_seeds() -> None:
    tag = pytest.importorskip("mpe2.simple_tag_v3", reason="the test extra is not installed")

    def collect(seed: int) -> Any:
        with dc.SyncDataCollector(tag.parallel_env, frames_per_batch=60) as collector:
            collector.set_seed(seed)
            return collector.next().exclude("collector")

    first = collect(3)
    assert (first == collect(3)).all()
    assert not torch.equal(first["agent", "observation"], collect(4)["agent", "observation"])


def test_entries_of_a_dict_observation_are_the_groups() -> None:
    space = spaces.Dict(
        {"observation": spaces.Box(0, 100, (2,), np.float32), "action_mask": spaces.MultiBinary(2)}
    )
    with dc.SyncDataCollector(lambda: Lives(space), frames_per_batch=8) as collector:
        batch = collector.next()
    assert batch["ant", "observation"].shape == (8, 2, 2)
    assert batch["ant", "action_mask"][0].tolist() == [[1, 0], [1, 0]]


def test_groups_of_ones_own() -> None:
    groups = {"first": ["ant_0"], "others": ["ant_1"], "bees": ["bee"]}
    env = Lives()
    with dc.SyncDataCollector(dc.PettingZooEnv(env, groups), frames_per_batch=8) as collector:
        batch = collector.next()
    assert batch["first", "action"].shape == (8, 1, 3)
    assert batch["next", "bees", "reward"].shape == (8, 1, 1)
    assert env.closed


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"all": ["ant_0", "ant_1", "bee"]}, dc.SpaceError, "'bee' has another action space"),
        ({"ants": ["ant_0", "ant_1"]}, dc.ArgumentError, "each of the agents"),
        ({"ants": ["ant_0", "ant_1"], "b": ["bee", "bee"]}, dc.ArgumentError, "each of the agents"),
    ],
)
def test_groups_that_cannot_be(groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dc.PettingZooEnv(Lives(), groups)


def test_a_vector_env_of_them_is_refused() -> None:
    """It would lose the agents' rewards."""
    env = SyncVectorEnv([lambda: dc.PettingZooEnv(Lives())])
    with pytest.raises(dc.ArgumentError, match=r"loses the rewards .* envs_per_worker"):
        dc.SyncDataCollector(lambda: env, frames_per_batch=4)


def test_an_entry_of_a_name_that_is_taken() -> None:
    space = spaces.Dict({"observation": spaces.Discrete(2), "mask": spaces.Discrete(2)})
    with pytest.raises(dc.SpaceError, match=r"needs the names \['mask'\]"):
        dc.PettingZooEnv(Lives(space))


def test_an_env_whose_agents_take_turns_is_refused_by_the_name_of_its_conversion() -> None:
    with pytest.raises(dc.EnvError, match=r"of an AECEnv, pettingzoo\.utils\.aec_to_parallel"):
        dc.SyncDataCollector(pettingzoo.AECEnv, frames_per_batch=20)


@pytest.mark.parametrize(
    ("dtype", "value", "misfit"),
    [
        (np.uint8, np.array([300, 1]), "value 300, which uint8 can't hold"),
        (np.uint8, np.array([-1, 1]), "value -1, which uint8 can't hold"),
        (np.int64, np.array([0.7, 1.0]), r"shape \[2\] and dtype float64, .* \[2\] and int64"),
        (np.float32, np.array([1e39, 1.0]), r"value 1e\+39, which float32 can't hold"),
        (np.float32, np.zeros(3), r"shape \[3\] and dtype float64, .* \[2\] and float32"),
    ],
)
def test_observations_that_their_space_can_not_hold(dtype: Any, value: Any, misfit: str) -> None:
    class Odd(Lives):
        def _see(self) -> dict[str, Any]:
            return dict.fromkeys(self.agents, value if self.count else np.zeros(2, dtype))

    maker = partial(Odd, spaces.Box(0, 100, (2,), dtype))
    check_raises(maker, f"observation of 'ant_0' has a part .*{misfit}")


def test_rewards_of_agents_that_are_not_finite() -> None:
    """Also where their sum is."""

    class Rich(Lives):
        def step(self, actions: dict[str, Any]) -> Any:
            seen, _, *rest = super().step(actions)
            return seen, {"ant_0": 1e39, "ant_1": -1e39, "bee": 1.0}, *rest

    check_raises(Rich, r"the ant\.reward, as float32, is inf")


def check_raises(maker: Any, match: str) -> None:
    """A batch of these envs raises such an EnvError."""
    faults = dc.Faults(max_env_faults=0)
    with (
        pytest.raises(dc.EnvError, match=match),
        dc.SyncDataCollector(maker, frames_per_batch=4, faults=faults) as collector,
    ):
        collector.next()


def test_normalize_is_refused() -> None:
    with pytest.raises(dc.ArgumentError, match="Gymnasium envs of one agent"):
        dc.SyncDataCollector(Lives, frames_per_batch=20, normalize=dc.Normalize())
