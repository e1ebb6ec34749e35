"""Exploration noise around policies of all kinds."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.counting_envs import ACTIONS
from helpers.loopback_pool import loopback_collector
from helpers.policy_binding import bind, pick
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

import distcollect as dc
from distcollect.rollout.spaces import leaves_of

ROWS = 4


def still(observation: torch.Tensor) -> torch.Tensor:
    """Return the action 0 of Pendulum."""
    return 0 * observation[:, :1]


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        return 0 * observation[:, :1] + self.bias, {"value": observation[:, 0]}


def still_td(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", still(td["observation"]))


def collector_of(policy: Any, env: Any = "Pendulum-v1", **settings: Any) -> Any:
    settings = {"envs_per_worker": ROWS, "frames_per_batch": ROWS * 50, **settings}
    return dc.SyncDataCollector(env, policy, **settings)


def actions_of(policy: Any, seed: int = 0, **settings: Any) -> torch.Tensor:
    with collector_of(policy, **settings) as collector:
        collector.set_seed(seed)
        return collector.next()["action"].squeeze(-1)


@pytest.mark.parametrize("action", ACTIONS)
def test_epsilon_greedy_takes_random_actions_of_any_space(action: str) -> None:
    leaves = leaves_of(ACTIONS[action], "action")
    fixed = [torch.from_numpy(leaf.zeros(400)) for leaf in leaves]
    keys = [leaf.key if len(leaf.key) > 1 else leaf.key[0] for leaf in leaves]

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.update(dict(zip(keys, fixed, strict=True)))

    for epsilon, low, high in [(0.0, 0, 0), (0.4, 0.2, 0.5), (1.0, 0.5, 1)]:
        bound, _ = bind(dc.EpsilonGreedy(policy, epsilon), action=action, n=400)
        bound.seed(range(400))
        columns = [torch.from_numpy(value).reshape(400, -1).double() for value in bound()[0]]
        assert low <= (torch.cat(columns, -1) != 0).any(-1).double().mean() <= high
    assert not any(value.any() for value in fixed)  # they are the policy's own


def test_random_actions_have_the_dtype_of_their_space() -> None:
    greedy = dc.EpsilonGreedy(lambda x: x[:, 0] > 0, 1.0)
    with collector_of(greedy, "MountainCar-v0") as collector:
        assert collector.next()["action"].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("policy", [still, Still(), still_td], ids=["function", "module", "td"])
def test_gaussian_noise_is_added_and_clipped(policy: Any) -> None:
    actions = actions_of(dc.GaussianNoise(policy, 1.0))
    inside = actions[actions.abs() < 2]
    assert 0.8 < inside.std() < 1.0  # of a normal distribution cut at two sigma: 0.88
    assert 0 < (actions.abs() == 2).float().mean() < 0.1
    assert torch.equal(actions, actions_of(dc.GaussianNoise(policy, 1.0)))
    assert not torch.equal(actions, actions_of(dc.GaussianNoise(policy, 1.0), seed=1))


def test_ornstein_uhlenbeck_noise_follows_its_formula_and_starts_anew_with_each_episode() -> None:
    gaussian = actions_of(dc.GaussianNoise(still, 0.1), max_frames_per_traj=20)
    noise = dc.OrnsteinUhlenbeckNoise(still, 0.2, theta=0.6, dt=0.25)  # sigma * sqrt(dt) = 0.1
    actions = actions_of(noise, max_frames_per_traj=20)
    for step in range(50):
        before = actions[:, step - 1] if step % 20 else torch.zeros(ROWS)
        expected = (1 - 0.6 * 0.25) * before + gaussian[:, step]  # the same random numbers
        assert torch.allclose(actions[:, step], expected, atol=1e-6)


@pytest.mark.parametrize("by", ["frames", "versions"])
def test_a_schedule_goes_by_the_frames_of_all_workers_or_by_versions(by: str) -> None:
    """Noise of std 1, 0.5 and 0 in three batches."""
    policy = Still()
    length = {"frames": 2 * ROWS * 50, "versions": 2}[by]
    noisy = dc.GaussianNoise(policy, dc.LinearSchedule(1.0, 0.0, **{by: length}))
    settings = {"frames_per_batch": ROWS * 50, "num_workers": 2, "envs_per_worker": ROWS // 2}
    with loopback_collector("Pendulum-v1", noisy, sync=True, **settings) as collector:
        collector.set_seed(0)
        for std in (1.0, 0.5, 0.0):
            deviation = float(collector.next(timeout_s=60)["action"].std())
            assert 0.75 * std <= deviation <= 1.1 * std
            collector.update_policy_weights_(noisy if std == 1 else policy)


def test_a_schedule_may_be_a_function() -> None:
    policy = dc.GaussianNoise(still, lambda version, frames: 0.3 * (version == 0 and frames < 400))
    with collector_of(policy) as collector:
        assert [bool(collector.next()["action"].any()) for _ in range(3)] == [True, True, False]


class Watching(gym.ActionWrapper[Any, Any, Any]):
    """Pendulum whose reward is the size of the action."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1", max_episode_steps=10))

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(np.abs(action).sum()), *rest

    def action(self, action: Any) -> Any:
        return action


@pytest.mark.parametrize("wrap", [dc.OrnsteinUhlenbeckNoise, lambda p: dc.EpsilonGreedy(p, 1.0)])
def test_there_is_no_noise_in_evaluations(wrap: Any) -> None:
    with collector_of(wrap(still), Watching) as collector:
        assert collector.next()["next", "reward"].all()
        for deterministic in (True, False):
            evaluation = collector.evaluate(num_episodes=2, deterministic=deterministic)
            assert not evaluation.returns.any()
    assert not actions_of(wrap(still), exploration_type="deterministic").any()


def test_wrappers_of_wrappers() -> None:
    both = dc.EpsilonGreedy(dc.GaussianNoise(still, 0.01), 0.5)
    assert 0.3 < (actions_of(both).abs() > 0.1).float().mean() < 0.6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dc.GaussianNoise(None, 0.1), dc.ArgumentTypeError, "policy=None"),
        (lambda: dc.GaussianNoise(still, -0.1), dc.ArgumentError, "std=-0.1.*0 or more"),
        (lambda: dc.EpsilonGreedy(still, "x"), dc.ArgumentTypeError, "epsilon='x'.*Linear"),
        (lambda: dc.EpsilonGreedy(still, 1.5), dc.ArgumentError, "epsilon=1.5.*from 0 to 1"),
        (lambda: dc.LinearSchedule(1, 0), dc.ArgumentError, "frames=None, versions=None.*one"),
        (lambda: dc.LinearSchedule(1, 0, frames=0), dc.ArgumentError, "frames=0, versions=None"),
        (lambda: dc.GaussianNoise(still, 0.1)(TensorDict()), dc.PolicyError, "outermost wrapper"),
        (
            lambda: collector_of(dc.GaussianNoise(still, lambda version, frames: None)),
            dc.PolicyError,
            "schedule .*raised TypeError.*policy_version=0, frames=0; .*a number",
        ),
        (
            lambda: collector_of(dc.EpsilonGreedy(still, lambda version, frames: float("nan"))),
            dc.PolicyError,
            "returned nan at policy_version=0, frames=0; .* 0 or more",
        ),
        (
            lambda: collector_of(dc.GaussianNoise(pick, 0.1), "CartPole-v1"),
            dc.PolicyError,
            r"GaussianNoise needs .* not Discrete\(2\): use EpsilonGreedy",
        ),
        (
            lambda: collector_of(
                dc.EpsilonGreedy(lambda x: Categorical(logits=x), 0.1), "CartPole-v1"
            ),
            dc.PolicyError,
            "a distribution, Categorical, but gets exploration noise",
        ),
        (
            lambda: collector_of(
                dc.GaussianNoise(lambda x: (still(x), {"action_log_prob": x[:, 0]}), 0.1)
            ),
            dc.PolicyError,
            "writes 'action_log_prob' but gets exploration noise",
        ),
    ],
)
def test_noise_that_makes_no_sense(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


class TestTorchRL:
    """TorchRL's own modules work as they are."""

    def policy(self, name: str) -> TensorDictSequential:
        modules, data = pytest.importorskip("torchrl.modules"), pytest.importorskip("torchrl.data")
        is_greedy = name == "EGreedyModule"
        spec = data.Categorical(2) if is_greedy else data.Bounded(-2, 2, (1,))
        noise = getattr(modules, name)(spec=spec, annealing_num_steps=1)
        act = (lambda x: x[:, 0].long() * 0) if is_greedy else still
        return TensorDictSequential(TensorDictModule(act, ["observation"], ["action"]), noise)

    @pytest.mark.parametrize("name", ["EGreedyModule", "AdditiveGaussianModule"])
    def test_noise_is_annealed_by_pushes_and_off_in_evaluations(self, name: str) -> None:
        policy = self.policy(name)
        env = "CartPole-v1" if name == "EGreedyModule" else "Pendulum-v1"
        settings = {"frames_per_batch": 400, "num_workers": 2, "sync": True}
        with loopback_collector(env, policy, **settings) as collector:
            collector.set_seed(0)
            before = collector.next(timeout_s=60)["action"].float().std()
            policy[1].step()  # to a tenth
            collector.update_policy_weights_(policy)
            after = collector.next(timeout_s=60)["action"].float().std()
            assert 0 < after < 0.7 * before

    def test_ornstein_uhlenbeck_noise_goes_on_until_an_episode_ends(self) -> None:
        policy = self.policy("OrnsteinUhlenbeckProcessModule")
        with collector_of(policy, max_frames_per_traj=20) as collector:
            collector.set_seed(0)
            batch = collector.next()
            assert torch.equal(batch["is_init"].nonzero()[:, 1], torch.tensor([0, 20, 40] * ROWS))
            assert torch.equal(batch["_ou_steps"][0], torch.arange(50) % 20)
            steps = batch["action"].squeeze(-1).diff(dim=1)
            assert 0.015 < steps[:, :19].std() < 0.025  # sigma * sqrt(dt) = 0.02
            assert batch["action"][:, 15:20].std() > 0.03  # it has drifted
            evaluation = collector.evaluate(num_episodes=1)
            assert evaluation.returns.isfinite().all()

    def test_ours_names_theirs_for_torchrl_envs(self) -> None:
        envs = pytest.importorskip("torchrl.envs")
        with pytest.raises(dc.PolicyError, match="OrnsteinUhlenbeckProcessModule"):
            collector_of(dc.GaussianNoise(still_td, 0.1), lambda: envs.GymEnv("Pendulum-v1"))
