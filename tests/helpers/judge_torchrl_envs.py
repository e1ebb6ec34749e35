"""Numbered envs of TorchRL: plain, batched, with nested done flags, and with changing shapes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from helpers.judge_frames import Place, same
from helpers.judge_truth import FACTS, NUM_ACTIONS, Row, Script
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

ENDS = ("done", "terminated", "truncated")
NUM_AGENTS = 2


class NumberedTorchRL(EnvBase):
    """Rows that number their frames.

    Args:
        rows: one for a plain env, of batch size []; several for a batched one.
        kind: "plain"; "nested": agents have done flags too, and the first dies two steps early;
            "dynamic": the entry "bag" has another length in each step, and a spec that says so;
            "growing": it is longer in every third step, and its spec says it never is.
    """

    def __init__(self, rows: list[Row], kind: str, *, batched: bool) -> None:
        shape = (len(rows),) if batched else ()
        super().__init__(batch_size=shape)
        self._rows, self._kind = rows, kind
        observation = Composite(
            observation=Unbounded((*shape, len(FACTS)), dtype=torch.int64), shape=shape
        )
        flags = {name: Categorical(2, (*shape, 1), dtype=torch.bool) for name in ENDS}
        done = Composite(flags, shape=shape)
        if kind == "nested":
            inner = (*shape, NUM_AGENTS)
            observation["agents"] = Composite(
                number=Unbounded((*inner, 1), dtype=torch.int64), shape=inner
            )
            own = {name: Categorical(2, (*inner, 1), dtype=torch.bool) for name in ENDS}
            done["agents"] = Composite(own, shape=inner)
        elif kind != "plain":
            length = -1 if kind == "dynamic" else 2
            observation["bag"] = Unbounded((*shape, length), dtype=torch.int64)
        self.observation_spec = observation
        self.action_spec = Categorical(NUM_ACTIONS, shape, dtype=torch.int64)
        self.reward_spec = Unbounded((*shape, 1))
        self.full_done_spec = done
        self._seen = torch.zeros(len(rows), len(FACTS), dtype=torch.int64)

    def _shown(self) -> dict[str, Any]:
        shape = self.batch_size
        shown: dict[str, Any] = {"observation": self._seen.reshape(*shape, -1).clone()}
        if self._kind == "nested":
            number = self._seen[:, 2].reshape(*shape, 1, 1) * 10
            number = number + torch.arange(NUM_AGENTS)[:, None]
            shown["agents"] = TensorDict({"number": number}, (*shape, NUM_AGENTS))
        elif self._kind != "plain":
            shown["bag"] = bag(self._kind, tuple(self._seen[0, :3].tolist())).expand(*shape, -1)
        return shown

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        which = torch.ones(len(self._rows)) if mask is None else mask.reshape(-1)
        for index, row in enumerate(self._rows):
            if which[index]:
                self._seen[index] = torch.from_numpy(row.reset())
        return TensorDict(self._shown(), self.batch_size)

    def _step(self, tensordict: Any) -> TensorDict:
        shape, count = self.batch_size, len(self._rows)
        rewards, ends = torch.zeros(count), torch.zeros(3, count, dtype=torch.bool)
        early = torch.zeros(count, dtype=torch.bool)
        for index, action in enumerate(tensordict["action"].reshape(-1)):
            row = self._rows[index]
            seen, rewards[index], ends[1, index], ends[2, index] = row.step(action)
            self._seen[index] = torch.from_numpy(seen)
            early[index] = row.steps >= row.script.length(row.row, row.episode) - 2
        ends[0] = ends[1] | ends[2]
        result = self._shown() | {"reward": rewards.reshape(*shape, 1)}
        result |= {name: ends[i].reshape(*shape, 1) for i, name in enumerate(ENDS)}
        if self._kind == "nested":
            for i, name in enumerate(ENDS):
                first = ends[i] | (early if name != "truncated" else ends[i])
                own = torch.stack([first, ends[i]], -1)
                result["agents"][name] = own.reshape(*shape, NUM_AGENTS, 1)
        return TensorDict(result, shape)

    def _set_seed(self, seed: int | None) -> None:
        pass


def bag(kind: str, place: tuple[int, ...]) -> torch.Tensor:
    """The entry of a changing length that belongs to a frame."""
    uid, episode, step = place
    length = 1 + (episode + step) % 4 if kind == "dynamic" else 2 + 30 * (step % 3 == 2)
    return torch.arange(length) + uid * 1000 + step * 10


def check_entries(batch: TensorDictBase, kind: str) -> None:
    """Compare the entries of a kind with what the env gave."""
    if kind == "nested":
        for part in (batch, batch["next"]):
            agents = part["agents"]
            same("batch size of the agents", (*batch.shape, NUM_AGENTS), agents.batch_size)
            same("names of the agents' dimensions", [*batch.names, None], agents.names)
    if kind == "plain":
        return
    for i in product(*map(range, batch.shape)):  # a batch of uneven entries has no other shape
        frame = batch[i]
        if ("collector", "mask") in frame.keys(True) and not frame["collector", "mask"]:
            continue
        for part in (frame, frame["next"]):
            place = Place(*part["observation"][:3].tolist())
            what = f"frame {i} of the batch, {place}"
            if kind == "nested":
                expected = [[place.step * 10], [place.step * 10 + 1]]
                same(f"{what}: number", expected, part["agents", "number"].tolist())
            else:
                same(f"{what}: bag", bag(kind, place).tolist(), part["bag"].tolist())


@dataclass(frozen=True)
class TorchRLMaker:
    """Makes such an env; can be pickled."""

    kind: str
    script: Script
    num_rows: int = 0  # 0: a plain env

    def __call__(self, context: Any) -> Any:
        rows = [
            self.script.row(context, context.env_index * max(1, self.num_rows) + index)
            for index in range(max(1, self.num_rows))
        ]
        return NumberedTorchRL(rows, self.kind, batched=self.num_rows > 0)
