"""A parallel env of PettingZoo in which agents die one by one; importing it imports pettingzoo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pettingzoo
from gymnasium import spaces

_LIVES = {"ant_0": 2, "ant_1": 4, "bee": 3}


class Lives(pettingzoo.ParallelEnv):
    """Agents die one by one; in every second episode the last one is truncated instead."""

    metadata = {"name": "lives_v0"}  # noqa: RUF012 - PettingZoo's own form

    def __init__(self, observation: Any = None, lives: dict[str, int] | None = None) -> None:
        self.lives = lives or _LIVES
        self.possible_agents = list(self.lives)
        self.agents: list[str] = []
        self.space = observation or spaces.Box(0, 100, (2,), np.float32)
        self.episode = -1
        self.count = 0
        self.closed = False

    def observation_space(self, agent: str) -> Any:
        return self.space

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5) if agent == "bee" else spaces.Box(-1, 1, (3,), np.float32)

    def _see(self) -> dict[str, Any]:
        seen = {}
        for agent in self.agents:
            value = np.array([self.count + 1, self.possible_agents.index(agent)], np.float32)
            is_dict = isinstance(self.space, spaces.Dict)
            seen[agent] = {"observation": value, "action_mask": [1, 0]} if is_dict else value
        return seen

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.episode += 1
        self.count = 0
        return self._see(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert all(self.action_space(agent).contains(each) for agent, each in actions.items())
        self.count += 1
        agents = self.agents
        rewards = {agent: 10.0 * self.count + self.possible_agents.index(agent) for agent in agents}
        over = {agent: self.count >= self.lives[agent] for agent in agents}
        last = len(agents) == sum(over.values())
        truncated = {agent: over[agent] and last and self.episode % 2 == 1 for agent in agents}
        terminated = {agent: over[agent] and not truncated[agent] for agent in agents}
        seen = self._see()
        self.agents = [agent for agent in agents if not over[agent]]
        return seen, rewards, terminated, truncated, {agent: {} for agent in agents}

    def close(self) -> None:
        self.closed = True
