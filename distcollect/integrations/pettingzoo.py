"""PettingZoo's parallel envs as Gymnasium envs. This module does not import pettingzoo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from distcollect.envs.base import OUTCOMES, Space
from distcollect.envs.coercion import MisfitError, write
from distcollect.envs.kinds import EnvKind
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError, SpaceError
from distcollect.rollout.spaces import Entries, flatten, leaves_of, unflatten

ParallelEnv: TypeAlias = Any  # pettingzoo.ParallelEnv, which may not be installed
Tree: TypeAlias = dict[str, Any]

_FLAGS = ("done", "terminated", "truncated")
_GROUP_NAMES = frozenset({"action", "mask", "reward", *_FLAGS})


def groups_by_name(agents: Iterable[str]) -> dict[str, list[str]]:
    """Agents "name_0", "name_1" … form the group "name"; any other agent is a group of its own."""
    groups: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        groups.setdefault(name if name and number.isdecimal() else agent, []).append(agent)
    return groups


class PettingZooEnv(gym.Env[Tree, Tree]):
    """A parallel env whose agents are put in groups; the agents of a group are stacked.

    An observation has for each group of n agents

    - "observation", ``[n, *shape]``: what the agents observe, zeros for absent agents. Where an
      agent's observation is a Dict with an entry "observation", all its entries stand here;
    - "mask", bool ``[n]``: the agents that are present, and act next;
    - "done", "terminated", "truncated", bool ``[n, 1]``: the flags of agents whose part is over.

    An action is ``{group: {"action": [n, *shape]}}``; the actions of absent agents are ignored.
    The reward of the env is the sum of the agents' rewards. The agents' rewards, float32
    ``[n, 1]``, are in ``info["outcomes"]``. The env ends when no agent is left: terminated if all
    agents were terminated, else truncated.

    Attributes:
        env: the parallel env.
        groups: the agents of each group, in the order in which they are stacked.
        outcome_space: space of ``info["outcomes"]``.
    """

    def __init__(self, env: ParallelEnv, groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Put the agents of ``env`` in groups.

        Args:
            env: a ``pettingzoo.ParallelEnv`` that has ``possible_agents``.
            groups: the agents of each group; each agent is in exactly one group. None: see
                :func:`groups_by_name`.

        Raises:
            ArgumentTypeError: ``env`` has no ``possible_agents``.
            ArgumentError: an agent is in no group, in two, or unknown.
            SpaceError: agents of a group have different spaces, or an entry has a reserved name.
        """
        if not hasattr(env, "possible_agents"):
            raise ArgumentTypeError(
                f"PettingZooEnv({env!r}): must be a ParallelEnv that has possible_agents"
            )
        self.env = env
        agents = list(env.possible_agents)
        self.groups = {
            name: list(members) for name, members in (groups or groups_by_name(agents)).items()
        }
        if sorted(chain.from_iterable(self.groups.values())) != sorted(agents):
            raise ArgumentError(
                f"groups={self.groups}: must contain each of the agents {agents} once, no others"
            )
        self._observation_spaces: dict[str, Space] = {}
        self._action_spaces: dict[str, Space] = {}
        # For each group, the leaves of its observation when no agent is present: zeros.
        self._absent: dict[str, list[np.ndarray]] = {}
        actions: dict[str, Space] = {}
        observations: dict[str, Space] = {}
        outcomes: dict[str, Space] = {}
        for group, members in self.groups.items():
            size = len(members)
            seen = self._space_in(group, "observation", env.observation_space)
            chosen = batch_space(self._space_in(group, "action", env.action_space), size)
            self._observation_spaces[group], self._action_spaces[group] = seen, chosen
            self._absent[group] = [leaf.zeros(size) for leaf in leaves_of(seen, "observation")]
            actions[group] = spaces.Dict({"action": chosen})
            entries = _entries(batch_space(seen, size))
            flags = {"mask": _flags(size)} | {name: _flags(size, 1) for name in _FLAGS}
            observations[group] = spaces.Dict({**entries, **flags})
            reward = spaces.Box(-np.inf, np.inf, (size, 1), np.float32)
            outcomes[group] = spaces.Dict({"reward": reward})
        self.action_space = Entries(actions)
        self.observation_space = spaces.Dict(observations)
        self.outcome_space = Entries(outcomes)
        # Of agents whose part is over: whether they were terminated, and truncated.
        self._ends: dict[str, tuple[bool, bool]] = {}

    def _space_in(self, group: str, role: str, space_of: Any) -> Space:
        """Return the space that the agents of a group share; SpaceError if they don't."""
        first: Space = space_of(self.groups[group][0])
        for agent in self.groups[group]:
            space = space_of(agent)
            # The bounds of observations may differ; action spaces must be equal.
            same = leaves_of(space, role) == leaves_of(first, role)
            if not same or (role == "action" and space != first):
                raise SpaceError(
                    f"{self.env}: {agent!r} has another {role} space than the first agent of its "
                    f"group {group!r}; put it in another group: PettingZooEnv(env, groups={{...}})"
                )
        if role == "observation" and (taken := _GROUP_NAMES & _entries(first).keys()):
            raise SpaceError(
                f"{self.env}: group {group!r} needs the names {sorted(taken)} for its own entries; "
                "rename these entries of the observation in a wrapper"
            )
        return first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, Tree]:
        """Begin an episode; see :class:`gymnasium.Env`."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._ends = {}
        return self._observation(observations), dict(infos)

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, Tree]:
        """Step all agents that are present; see :class:`gymnasium.Env`."""
        present = set(self.env.agents)
        actions = {
            agent: each
            for group, members in self.groups.items()
            for agent, each in zip(
                members, iterate(self._action_spaces[group], action[group]["action"]), strict=True
            )
            if agent in present
        }
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        for agent, terminated in terminations.items():
            if terminated or truncations[agent]:
                self._ends[agent] = bool(terminated), bool(truncations[agent])
        with np.errstate(over="ignore"):  # check_nan says more
            outcomes = {
                group: {
                    "reward": np.array([[rewards.get(each, 0)] for each in members], np.float32)
                }
                for group, members in self.groups.items()
            }
        over = not self.env.agents
        terminated = over and all(terminated for terminated, _ in self._ends.values())
        return (
            self._observation(observations),
            float(sum(rewards.values())),
            terminated,
            over and not terminated,
            {**infos, OUTCOMES: outcomes},
        )

    def _observation(self, observations: Mapping[str, Any]) -> Tree:
        present = set(self.env.agents)
        tree: Tree = {}
        for group, members in self.groups.items():
            space = self._observation_spaces[group]
            parts = [part.copy() for part in self._absent[group]]
            for index, agent in enumerate(members):
                if agent not in observations:
                    continue
                for part, value in zip(parts, flatten(space, observations[agent]), strict=True):
                    try:
                        write(part[index, ...], value)
                    except MisfitError as misfit:
                        raise EnvError(
                            f"{self.env}: the observation of {agent!r} has a part {misfit}, its "
                            f"space says {list(part.shape[1:])} and {part.dtype}"
                        ) from None
            flags = np.array([self._ends.get(agent, (False, False)) for agent in members])
            tree[group] = {
                **_entries(unflatten(space, iter(parts))),
                "mask": np.array([agent in present for agent in members]),
                "done": flags.any(1, keepdims=True),
                "terminated": flags[:, :1],
                "truncated": flags[:, 1:],
            }
        return tree

    def render(self) -> Any:
        """Render the parallel env."""
        return self.env.render()

    def close(self) -> None:
        """Close the parallel env."""
        self.env.close()


def _entries(observation: Any) -> Tree:
    """Return a group's entries for an observation of its agents, or for its space, by name."""
    entries = observation.spaces if isinstance(observation, spaces.Dict) else observation
    if isinstance(entries, dict) and "observation" in entries:
        return dict(entries)
    return {"observation": observation}


def _flags(*shape: int) -> spaces.Box:
    boolean: Any = np.bool_
    return spaces.Box(0, 1, shape, boolean)


class PettingZooKind(EnvKind):
    """PettingZoo's parallel envs, which are wrapped in envs of Gymnasium."""

    def prepared(self, env: ParallelEnv, device: torch.device | None) -> PettingZooEnv:
        return PettingZooEnv(env)


KIND = PettingZooKind()
