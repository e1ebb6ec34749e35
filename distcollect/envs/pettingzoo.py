"""PettingZoo's parallel envs as Gymnasium envs, their agents in groups; needs no import of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from distcollect.envs.base import Space
from distcollect.errors import ArgumentError, EnvError, SpaceError
from distcollect.rollout.spaces import Entries, flatten, leaves_of, unflatten

ParallelEnv: TypeAlias = Any  # pettingzoo.ParallelEnv, which may not be installed
Tree: TypeAlias = dict[str, Any]

# Where a step's info has what stands under "next" only.
OUTCOMES = "outcomes"
_FLAGS = ("done", "terminated", "truncated")
_OF_GROUPS = frozenset({"action", "mask", "reward", *_FLAGS})


def groups_by_name(agents: Iterable[str]) -> dict[str, list[str]]:
    """The agents "name_0", "name_1" … are the group "name"; any other is one of its own."""
    groups: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        groups.setdefault(name if name and number.isdecimal() else agent, []).append(agent)
    return groups


class PettingZooEnv(gym.Env[Tree, Tree]):
    """A parallel env whose observations and actions are those of groups, stacked over their agents.

    An observation has for each group of n agents

    - "observation", ``[n, *shape]``, or where an agent's is a Dict with such an entry, all of its
      entries: what an agent sees, zeros if it isn't there;
    - "mask", bool ``[n]``: the agents that act next;
    - "done", "terminated", "truncated", bool ``[n, 1]``: of agents that are over.

    An action has ``{group: {"action": [n, *shape]}}``; what stands there for agents that aren't
    there is ignored. The reward of the env is the sum of its agents'; those, float32 ``[n, 1]``,
    are in ``info["outcomes"]``. The env ends when it has no agents left: terminated if each of them
    was, else truncated.

    Attributes:
        env: the parallel env.
        groups: the agents of each group, in the order in which they are stacked.
        outcome_space: of ``info["outcomes"]``.
    """

    def __init__(self, env: ParallelEnv, groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Group the agents of ``env``.

        Args:
            env: a ``pettingzoo.ParallelEnv`` that knows its ``possible_agents``.
            groups: the agents of each group, all in one and only one; None: as
                :func:`groups_by_name` has them.

        Raises:
            ArgumentError: an agent is in no group, in two, or unknown.
            SpaceError: agents of a group have different spaces, or entries of a name that is taken.
        """
        self.env = env
        agents = list(env.possible_agents)
        self.groups = {
            name: list(members) for name, members in (groups or groups_by_name(agents)).items()
        }
        if sorted(chain.from_iterable(self.groups.values())) != sorted(agents):
            raise ArgumentError(
                f"groups={self.groups}: must have each of the agents {agents} once, and no others"
            )
        self._observed = {
            group: self._space_in(group, "observation", env.observation_space)
            for group in self.groups
        }
        # Of each leaf of what the agents of a group see, as if none of them was there.
        self._nothing = {
            group: [leaf.zeros(len(self.groups[group])) for leaf in leaves_of(space, "observation")]
            for group, space in self._observed.items()
        }
        acted = {group: self._space_in(group, "action", env.action_space) for group in self.groups}
        sizes = {group: len(members) for group, members in self.groups.items()}
        self._actions = {group: batch_space(acted[group], size) for group, size in sizes.items()}
        self.action_space = Entries(
            {group: spaces.Dict({"action": space}) for group, space in self._actions.items()}
        )
        self.observation_space = spaces.Dict(
            {
                group: spaces.Dict(
                    {
                        **_entries(batch_space(self._observed[group], size)),
                        "mask": _flags(size),
                        **{name: _flags(size, 1) for name in _FLAGS},
                    }
                )
                for group, size in sizes.items()
            }
        )
        self.outcome_space = spaces.Dict(
            {
                group: spaces.Dict({"reward": spaces.Box(-np.inf, np.inf, (size, 1), np.float32)})
                for group, size in sizes.items()
            }
        )
        self._terminated: dict[str, bool] = {}  # of the agents that are over
        self._truncated: dict[str, bool] = {}

    def _space_in(self, group: str, role: str, space_of: Any) -> Space:
        """The space that all agents of a group have."""
        first: Space = space_of(self.groups[group][0])
        for agent in self.groups[group]:
            space = space_of(agent)
            # The bounds of observations may differ, but what an action means may not.
            same = leaves_of(space, role) == leaves_of(first, role)
            if not same or (role == "action" and space != first):
                raise SpaceError(
                    f"{self.env}: {agent!r} has another {role} space than the first of its group "
                    f"{group!r}; put it in a group of its own: PettingZooEnv(env, groups={{...}})"
                )
        if role == "observation" and (taken := _OF_GROUPS & _entries(first).keys()):
            raise SpaceError(
                f"{self.env}: group {group!r} needs the names {sorted(taken)} for itself; rename "
                "these entries of the observation in a wrapper"
            )
        return first

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tree, Tree]:
        """Begin an episode; see :class:`gymnasium.Env`."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self._terminated, self._truncated = {}, {}
        return self._observation(observations), dict(infos)

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, Tree]:
        """Have all agents act that are there; see :class:`gymnasium.Env`."""
        present = set(self.env.agents)
        actions = {
            agent: each
            for group, members in self.groups.items()
            for agent, each in zip(
                members, iterate(self._actions[group], action[group]["action"]), strict=True
            )
            if agent in present
        }
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        for agent, terminated in terminations.items():
            if terminated or truncations[agent]:
                self._terminated[agent] = bool(terminated)
                self._truncated[agent] = bool(truncations[agent])
        outcomes = {
            group: {"reward": np.array([[rewards.get(agent, 0)] for agent in members], np.float32)}
            for group, members in self.groups.items()
        }
        over = not self.env.agents
        terminated = over and all(self._terminated.values())
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
            space = self._observed[group]
            parts = [part.copy() for part in self._nothing[group]]
            for index, agent in enumerate(members):
                if agent not in observations:
                    continue
                for part, value in zip(parts, flatten(space, observations[agent]), strict=True):
                    if np.shape(value) != part.shape[1:]:
                        raise EnvError(
                            f"{self.env}: the observation of {agent!r} has a part of shape "
                            f"{list(np.shape(value))}, its space says {list(part.shape[1:])}"
                        )
                    part[index] = value
            tree[group] = {
                **_entries(unflatten(space, iter(parts))),
                "mask": np.array([agent in present for agent in members]),
                "done": np.array([[agent in self._terminated] for agent in members]),
                "terminated": np.array([[self._terminated.get(agent, False)] for agent in members]),
                "truncated": np.array([[self._truncated.get(agent, False)] for agent in members]),
            }
        return tree

    def render(self) -> Any:
        """Render the parallel env."""
        return self.env.render()

    def close(self) -> None:
        """Close the parallel env."""
        self.env.close()


def _entries(observation: Any) -> Tree:
    """What a group has of its agents' observation, or of its space, by name."""
    entries = observation.spaces if isinstance(observation, spaces.Dict) else observation
    if isinstance(entries, dict) and "observation" in entries:
        return dict(entries)
    return {"observation": observation}


def _flags(*shape: int) -> spaces.Box:
    boolean: Any = np.bool_
    return spaces.Box(0, 1, shape, boolean)
