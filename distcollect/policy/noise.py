"""Exploration noise: wrappers of a policy, and what they do to the actions of n envs.

A wrapper only says what noise a policy gets. :class:`~distcollect.policy.user.UserPolicy` takes it
off, and has a :class:`NoiseProcess` change the actions that the policy chose.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from distcollect.errors import ArgumentError, ArgumentTypeError, PolicyError

Schedule: TypeAlias = float | Callable[[int, int], float]
Actions: TypeAlias = Sequence[np.ndarray]
# Draws actions from the action space for some rows; those of other rows have no meaning.
Draw: TypeAlias = Callable[[Sequence[int]], Actions]


@dataclass(frozen=True)
class LinearSchedule:
    """Goes from one value to another in a straight line, and stays there.

    A schedule is any function of the policy_version and of the number of frames. Frames are those
    of all workers that the collector had asked for when it asked for the rollout; in sync mode, for
    the batch. So they do not depend on the number of workers, and go on in a resumed run.

    Source: Mnih et al., "Human-level control through deep reinforcement learning", 2015.

    Attributes:
        start: the first value.
        end: the last value.
        frames: after how many frames it is reached.
        versions: after how many versions it is reached; give one of the two.
    """

    start: float
    end: float
    frames: int | None = None
    versions: int | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.frames, self.versions) if each is not None]
        if len(given) != 1 or given[0] < 1:
            raise ArgumentError(
                f"LinearSchedule(frames={self.frames}, versions={self.versions}): give one of the "
                "two, 1 or more"
            )

    def __call__(self, policy_version: int, frames: int) -> float:
        """Return the value at this version and number of frames."""
        done = frames / self.frames if self.frames else policy_version / (self.versions or 1)
        return self.start + (self.end - self.start) * min(1.0, done)


class NoiseProcess(ABC):
    """Changes the actions of n envs."""

    def __init__(self, schedule: Schedule) -> None:
        """Begin at version 0 and no frames."""
        self._schedule = schedule
        self.progress(0, 0)

    def progress(self, policy_version: int, frames: int) -> None:
        """Take the strength that the schedule has at this version and number of frames.

        Raises:
            PolicyError: the schedule raised, or returned no number.
        """
        schedule = self._schedule
        try:
            self.level = float(schedule(policy_version, frames) if callable(schedule) else schedule)
        except Exception as error:
            raise PolicyError(
                f"the schedule of the exploration noise raised {type(error).__name__}: {error} at "
                f"policy_version={policy_version}, frames={frames}; it must return a number"
            ) from error
        if not self.level >= 0:
            raise PolicyError(
                f"the schedule of the exploration noise returned {self.level} at policy_version="
                f"{policy_version}, frames={frames}; it must be 0 or more"
            )

    def begin(self, rows: Sequence[int]) -> None:  # noqa: B027 - most have no memory
        """Episodes begin in ``rows``."""

    @abstractmethod
    def change(self, actions: Actions, rows: Sequence[int] | None) -> Actions:
        """Return the actions with noise, ``[n, *shape]`` for each leaf; copies.

        Args:
            actions: what the policy chose.
            rows: the envs whose action is used; None: all.
        """


class ExplorationNoise(ABC):
    """A policy whose actions get noise where a collector steps envs with it.

    ``evaluate()`` plays without noise, and so does a collector whose ``exploration_type`` is not
    "random". After ``set_seed``, the noise of env i depends only on (seed, i). A policy that
    returns a distribution or ``action_log_prob`` is refused: that would be of another action.

    Attributes:
        policy: the policy without the noise, of any kind that a collector takes. Push its weights.
    """

    def __init__(
        self, policy: Callable[..., Any], most: float = math.inf, **levels: Schedule
    ) -> None:
        """Wrap ``policy``.

        Raises:
            ArgumentTypeError: it can't be called, or a level is no number or function.
            ArgumentError: a level is negative, or above ``most``.
        """
        kind = type(self).__name__
        if not callable(policy):
            raise ArgumentTypeError(f"{kind}(policy={policy!r}): pass a module or a function")
        for name, level in levels.items():
            ends = (level.start, level.end) if isinstance(level, LinearSchedule) else (level,)
            for value in ends:
                if callable(value):
                    continue
                if not isinstance(value, int | float):
                    raise ArgumentTypeError(
                        f"{kind}({name}={level!r}): pass a number, a LinearSchedule, or a function "
                        "of (policy_version, frames)"
                    )
                if not 0 <= value <= most:
                    limit = "0 or more" if most == math.inf else f"from 0 to {most}"
                    raise ArgumentError(f"{kind}({name}={level!r}): must be {limit}")
        self.policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PolicyError: only a collector knows the action space, and when episodes begin."""
        kind = type(self).__name__
        raise PolicyError(
            f"{kind} adds its noise where a collector steps envs, so it must be the outermost "
            f"wrapper of the policy. To call the policy yourself, call {kind}.policy"
        )

    @abstractmethod
    def process(self, space: gym.Space[Any], num_envs: int, draw: Draw) -> NoiseProcess:
        """Return the process for ``num_envs`` envs.

        Args:
            space: action space of a single env.
            num_envs: n.
            draw: draws from the space.

        Raises:
            PolicyError: there is no such noise in this space.
        """


class EpsilonGreedy(ExplorationNoise):
    """With probability epsilon an env gets a random action in place of the policy's.

    Random actions are drawn from the action space, of any kind, as with ``policy=None``.

    Source: Watkins, "Learning from delayed rewards", 1989; Mnih et al., 2015.
    """

    def __init__(self, policy: Callable[..., Any], epsilon: Schedule) -> None:
        """Wrap ``policy``; ``epsilon`` is from 0 to 1, or a schedule."""
        super().__init__(policy, most=1, epsilon=epsilon)
        self.epsilon = epsilon

    def process(self, space: gym.Space[Any], num_envs: int, draw: Draw) -> NoiseProcess:
        return _EpsilonGreedy(self.epsilon, num_envs, draw)


class _EpsilonGreedy(NoiseProcess):
    def __init__(self, epsilon: Schedule, num_envs: int, draw: Draw) -> None:
        super().__init__(epsilon)
        self._num_envs, self._draw = num_envs, draw

    def change(self, actions: Actions, rows: Sequence[int] | None) -> Actions:
        explores = np.flatnonzero(torch.rand(self._num_envs, device="cpu").numpy() < self.level)
        if rows is not None:
            explores = np.intersect1d(explores, rows)
        if not explores.size:
            return actions
        drawn = self._draw(explores.tolist())
        # Their dtype, as the policy's may be too narrow: bool, if it chooses between two of many.
        changed = [a.astype(other.dtype) for a, other in zip(actions, drawn, strict=True)]
        for action, other in zip(changed, drawn, strict=True):
            action[explores] = other[explores]
        return changed


class GaussianNoise(ExplorationNoise):
    """Adds normal noise to the actions, and clips the sum to the bounds of the action space.

    ``clip(action + std * N(0, 1), low, high)``, for action spaces that are a Box of floats.

    Source: Fujimoto et al., "Addressing function approximation error in actor-critic methods",
    2018, algorithm 1.
    """

    def __init__(self, policy: Callable[..., Any], std: Schedule) -> None:
        """Wrap ``policy``; ``std`` is in units of the action, or a schedule."""
        super().__init__(policy, std=std)
        self.std = std

    def process(self, space: gym.Space[Any], num_envs: int, draw: Draw) -> NoiseProcess:
        return _Additive(self.std, _box(space, self))


class _Additive(NoiseProcess):
    def __init__(self, level: Schedule, space: spaces.Box) -> None:
        super().__init__(level)
        self._space = space

    def change(self, actions: Actions, rows: Sequence[int] | None) -> Actions:
        (action,) = actions
        normal = torch.randn(action.shape, device="cpu").numpy()
        changed = action + self.noise(normal, rows).astype(action.dtype)
        return [np.clip(changed, self._space.low, self._space.high)]

    def noise(self, normal: np.ndarray, rows: Sequence[int] | None) -> np.ndarray:
        """Return what to add, given standard normal numbers ``[n, *shape]``."""
        return normal * self.level


class OrnsteinUhlenbeckNoise(ExplorationNoise):
    """Adds noise that drifts back to 0, and clips the sum to the bounds of the action space.

    The noise of an episode begins with x = 0, and in each frame
    ``x += -theta * x * dt + sigma * sqrt(dt) * N(0, 1)``, for spaces that are a Box of floats.

    Source: Uhlenbeck and Ornstein, "On the theory of the Brownian motion", 1930; Lillicrap et al.,
    "Continuous control with deep reinforcement learning", 2015.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        sigma: Schedule = 0.2,
        *,
        theta: float = 0.15,
        dt: float = 1e-2,
    ) -> None:
        """Wrap ``policy``.

        Args:
            policy: the policy.
            sigma: size of the random part, in units of the action, or a schedule.
            theta: how fast the noise drifts back.
            dt: the time of a frame, in the units of ``theta``.
        """
        super().__init__(policy, sigma=sigma, theta=theta, dt=dt)
        self.sigma, self.theta, self.dt = sigma, theta, dt

    def process(self, space: gym.Space[Any], num_envs: int, draw: Draw) -> NoiseProcess:
        return _OrnsteinUhlenbeck(self, _box(space, self), num_envs)


class _OrnsteinUhlenbeck(_Additive):
    def __init__(self, noise: OrnsteinUhlenbeckNoise, space: spaces.Box, num_envs: int) -> None:
        super().__init__(noise.sigma, space)
        self._theta, self._dt = noise.theta, noise.dt
        self._x = np.zeros((num_envs, *space.shape))

    def begin(self, rows: Sequence[int]) -> None:
        self._x[list(rows)] = 0

    def noise(self, normal: np.ndarray, rows: Sequence[int] | None) -> np.ndarray:
        change = self._theta * -self._x * self._dt + self.level * self._dt**0.5 * normal
        where = slice(None) if rows is None else list(rows)
        self._x[where] += change[where]
        return self._x


def wrappers_of(policy: Any) -> list[ExplorationNoise]:
    """Return the wrappers of noise around a policy, the outermost first."""
    found: list[ExplorationNoise] = []
    while isinstance(policy, ExplorationNoise):
        found.append(policy)
        policy = policy.policy
    return found


def noises_of(policy: Any, space: gym.Space[Any], num_envs: int, draw: Draw) -> list[NoiseProcess]:
    """Return what the wrappers around a policy do to its actions, in their order.

    See :meth:`ExplorationNoise.process`.
    """
    return [each.process(space, num_envs, draw) for each in reversed(wrappers_of(policy))]


def with_noise_of(policy: Any, other: Callable[..., Any]) -> Any:
    """Return ``other`` in wrappers like those around a policy."""
    for wrapper in reversed(wrappers_of(policy)):
        other, inner = copy.copy(wrapper), other
        other.policy = inner
    return other


def without_noise(policy: Any) -> Any:
    """Return the policy in all wrappers of noise; anything else is returned as it is."""
    wrappers = wrappers_of(policy)
    return wrappers[-1].policy if wrappers else policy


def _box(space: gym.Space[Any], noise: ExplorationNoise) -> spaces.Box:
    """Return the action space if noise can be added to its actions."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space
    raise PolicyError(
        f"{type(noise).__name__} needs an action space that is a Box of floats, not {space}: use "
        "EpsilonGreedy, or add the noise in the policy"
    )
