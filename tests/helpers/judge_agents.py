"""A numbered env of PettingZoo in which agents die early, and what is right for its agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pettingzoo
import torch
from helpers.judge_envs import ACTION, OBSERVATION
from helpers.judge_frames import DTYPES, Place, expect, same
from helpers.judge_truth import Row, Script, read_truth
from tensordict import TensorDict, TensorDictBase

# By how many steps each one dies before the last one, the bee.
EARLY = {"ant_0": 4, "ant_1": 2, "bee": 0}
ANTS = ("ant_0", "ant_1")


def life(agent: str, length: int) -> int:
    """How many steps an agent makes in an episode of this length."""
    return max(1, length - EARLY[agent])


def bonus(agent: str, step: int) -> int:
    """The reward of an ant for a step."""
    return step + 10 * (1 + ANTS.index(agent))


class NumberedAgents(pettingzoo.ParallelEnv):
    """Each agent sees the facts of the env's row, with its own last action."""

    metadata = {"name": "numbered_v0"}  # noqa: RUF012 - PettingZoo's own form
    possible_agents = list(EARLY)  # noqa: RUF012

    def __init__(self, row: Row) -> None:
        self._row = row
        row.num_ways = 2
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(EARLY)
        seen = self._row.reset()
        return {agent: seen.copy() for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        agents, row, step = self.agents, self._row, self._row.steps
        assert list(actions) == agents, f"actions of {list(actions)}, but {agents} are there"
        bonuses = {agent: bonus(agent, step) for agent in agents if agent != "bee"}
        seen, reward, *ends = row.step(actions["bee"], sum(bonuses.values()))
        length = row.script.length(row.row, row.episode)
        over = {agent: row.steps >= life(agent, length) for agent in agents}
        early = {agent: over[agent] and not any(ends) for agent in agents}
        terminated = {agent: early[agent] or (over[agent] and ends[0]) for agent in agents}
        truncated = {agent: over[agent] and ends[1] for agent in agents}
        rewards = {**bonuses, "bee": reward - sum(bonuses.values())}
        observations = {agent: np.array([*seen[:3], actions[agent]]) for agent in agents}
        self.agents = [agent for agent in agents if not over[agent]]
        return observations, rewards, terminated, truncated, {agent: {} for agent in agents}


@dataclass(frozen=True)
class AgentsMaker:
    """Makes such an env; can be pickled."""

    script: Script

    def __call__(self, context: Any) -> Any:
        return NumberedAgents(self.script.row(context, context.env_index))


def as_one_agent(batch: TensorDictBase) -> TensorDict:
    """The batch as the bee has it, who lives as long as the env."""
    bee = {"observation": ("bee", "observation"), "action": ("bee", "action")}
    bee |= {("next", "observation"): ("next", "bee", "observation")}
    names = [key for key in [*DTYPES, ("collector", "mask")] if key in batch.keys(True)]
    entries = {key: batch[key] for key in names}
    entries |= {key: batch[given].squeeze(batch.ndim) for key, given in bee.items()}
    one = TensorDict({}, batch.shape, names=batch.names)
    for key, value in entries.items():
        one[key] = value
    return one


def check_agents(batch: TensorDictBase, script: Script) -> None:
    """Compare what each ant has in each frame with what really happened to it."""
    truth = read_truth(script.folder)
    flat = batch.reshape(-1)
    for i, frame in enumerate(flat.unbind(0)):
        if ("collector", "mask") in frame.keys(True) and not frame["collector", "mask"]:
            continue
        uid, episode, step, _ = frame["bee", "observation"][0].tolist()
        place = Place(uid, episode, step)
        length = script.length(truth[uid].row, episode)
        for what, expected, got in _facts_of_ants(frame, place, length):
            same(f"frame {i} of the batch, {place}: {what}", expected, got)
        bonuses = frame["next", "ant", "reward"].sum() + frame["next", "bee", "reward"].sum()
        same(f"{place}: sum of the agents' rewards", frame["next", "reward"].item(), bonuses.item())
        ended = frame["next", "done"].item()
        for group in ("ant", "bee"):
            done, terminated, truncated = (
                frame["next", group, name].flatten() for name in ("done", "terminated", "truncated")
            )
            what = f"frame {i} of the batch, {place} (length {length}): {group}"
            either = torch.equal(done, terminated | truncated)
            expect(either, f"{what}.done", expected=(terminated, truncated), got=done)
            if ended:
                expect(bool(done.all()), f"{what}.done", expected="all, as the root", got=done)


def _facts_of_ants(
    frame: TensorDictBase, place: Place, length: int
) -> Iterator[tuple[str, object, object]]:
    uid, episode, step = place
    for index, name in enumerate(ANTS):
        lives = life(name, length)
        ant = {key: value[index] for key, value in frame["ant"].items()}
        after = {key: value[index] for key, value in frame["next", "ant"].items()}
        yield f"mask of {name}", step < lives, ant["mask"].item()
        yield f"done of {name}", step >= lives, ant["done"].item()
        seen = [uid, episode, step] if step <= lives else [0, 0, 0]
        yield f"observation of {name}", seen, ant["observation"][:3].tolist()
        following = [uid, episode, step + 1, ant["action"].item()]
        following = following if step < lives else [0, 0, 0, 0]
        yield f"next observation of {name}", following, after["observation"].tolist()
        reward = bonus(name, step) if step < lives else 0
        yield f"reward of {name}", reward, after["reward"].item()
        goes_on = not frame["next", "done"].item()
        if goes_on or step + 1 >= lives:
            yield f"next done of {name}", step + 1 >= lives, after["done"].item()
