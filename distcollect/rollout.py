"""The data contract: how frames lie in a worker's memory, on the wire, and in a batch.

A worker writes frames into a :class:`Slab`, whose tensors are what travels: each observation once.
:func:`assemble` turns the tensors of one or more rollouts into the batch that the user gets, with
TorchRL's keys, rebuilding what follows from the rest (``next`` observations, ``done``, ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

from .spaces import Arrays, Key, Leaf, nested

Tensors = list[torch.Tensor]

_BOOKKEEPING = (
    Leaf(("reward",), (), torch.float32),
    Leaf(("terminated",), (), torch.bool),
    Leaf(("truncated",), (), torch.bool),
    Leaf(("traj_ids",), (), torch.int64),
    Leaf(("policy_version",), (), torch.int64),
)


@dataclass(frozen=True)
class Layout:
    """What a frame of one worker consists of; with a number of steps it fixes every shape.

    Attributes:
        num_envs: n, the rows of a rollout.
        carried: leaves that a frame has at its start and at its end: observations, info entries.
        action: leaves of the action.
        extras: what else the policy writes, e.g. log-probabilities.
    """

    num_envs: int
    carried: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    extras: tuple[Leaf, ...]

    @property
    def per_frame(self) -> tuple[Leaf, ...]:
        """Leaves of shape ``[n, T, *shape]``, in the order in which they travel."""
        return (*self.carried, *self.action, *self.extras, *_BOOKKEEPING)

    def num_bytes(self, num_steps: int) -> int:
        """Size of a rollout of ``num_steps`` steps, without final observations."""
        frame = sum(_num_bytes(leaf) for leaf in self.per_frame)
        tail = sum(_num_bytes(leaf) for leaf in self.carried)
        return self.num_envs * (num_steps * frame + tail)


def _num_bytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


class Slab:
    """Memory for one rollout ``[n, T]``, written in place by the engine, used again and again.

    The tensors are torch's own (the RPC layer would copy memory that numpy owns once more before
    sending it) and are written through numpy views, which cost a fraction per small write.
    """

    def __init__(self, layout: Layout, num_steps: int) -> None:
        n, steps = layout.num_envs, num_steps
        self.layout = layout
        self.num_steps = steps
        self._frames: Tensors = [
            torch.zeros((n, steps, *leaf.shape), dtype=leaf.dtype) for leaf in layout.per_frame
        ]
        self._tail: Tensors = [
            torch.zeros((n, *leaf.shape), dtype=leaf.dtype) for leaf in layout.carried
        ]
        self.frames: Arrays = {
            leaf.key: tensor.numpy()
            for leaf, tensor in zip(layout.per_frame, self._frames, strict=True)
        }
        self.root: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.carried}
        self.action: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.action}
        self.extras = {
            leaf.key: tensor
            for leaf, tensor in zip(layout.per_frame, self._frames, strict=True)
            if leaf in layout.extras
        }
        self.tail: Arrays = {
            leaf.key: tensor.numpy()
            for leaf, tensor in zip(layout.carried, self._tail, strict=True)
        }
        self.reward = self.frames["reward",]
        self.terminated = self.frames["terminated",]
        self.truncated = self.frames["truncated",]
        self.traj_ids = self.frames["traj_ids",]
        self.policy_version = self.frames["policy_version",]
        self._final_at: list[int] = []
        self._final: dict[Key, list[np.ndarray]] = {leaf.key: [] for leaf in layout.carried}

    def clear_ends(self) -> None:
        """Forget the episode ends of the last rollout; the engine writes only where one ends."""
        self.terminated.fill(False)
        self.truncated.fill(False)
        self._final_at.clear()
        for rows in self._final.values():
            rows.clear()

    def add_final(
        self, row: int, step: int, final: Arrays, *, source_row: int | None = None
    ) -> None:
        """Keep the true final observation of the episode that ended in ``row`` at ``step``.

        It stands in the same row of ``final``, or in ``source_row``.
        """
        self._final_at.append(row * self.num_steps + step)
        source = row if source_row is None else source_row
        for key, rows in self._final.items():
            rows.append(final[key][source].copy())

    def tensors(self) -> Tensors:
        """The rollout as it travels. They are this slab's memory: valid until it is used again."""
        final = [
            torch.from_numpy(np.stack(rows)) if rows else leaf_empty(leaf)
            for leaf, rows in zip(self.layout.carried, self._final.values(), strict=True)
        ]
        at = torch.tensor(self._final_at, dtype=torch.int64)
        return [*self._frames, *self._tail, at, *final]


def leaf_empty(leaf: Leaf) -> torch.Tensor:
    """A tensor ``[0, *leaf.shape]``."""
    return torch.empty((0, *leaf.shape), dtype=leaf.dtype)


@dataclass(frozen=True)
class Header:
    """What the trainer learns of a rollout before any of its data moves.

    Attributes:
        worker_id: the slot that collected it.
        incarnation: which process in that slot.
        sequence: counts the rollouts of this process from 0.
        num_frames: real frames in it.
        num_bytes: size of its tensors.
        policy_version: (lowest, highest) version among its frames.
        stepped: frames its process has stepped in all.
        lost: of these, the frames that are in no rollout, by cause.
    """

    worker_id: int
    incarnation: int
    sequence: int
    num_frames: int
    num_bytes: int
    policy_version: tuple[int, int]
    stepped: int = 0
    lost: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """A rollout at the trainer: its header and its tensors in wire order."""

    header: Header
    tensors: Tensors


def assemble(
    layout: Layout,
    rollouts: Sequence[Rollout],
    *,
    stack: bool = False,
    squeeze: bool = False,
    device: torch.device | None = None,
) -> TensorDict:
    """Build the batch from rollouts of one layout, in the order given.

    Args:
        layout: what every one of them consists of.
        rollouts: W rollouts of n rows and T steps each.
        stack: give ``[W, n, T]`` instead of ``[W * n, T]``.
        squeeze: drop the row dimension where there is one row (only with a single rollout).
        device: where the batch is wanted; None: where the tensors are.

    Returns:
        A TensorDict whose last dimension is named "time"; its tensors share no memory with each
        other, and with the rollouts only where there is a single one, which it then takes over.
    """
    one = len(rollouts) == 1
    num_frame_leaves, num_carried = len(layout.per_frame), len(layout.carried)

    def joined(index: int) -> torch.Tensor:
        if one:
            tensor = rollouts[0].tensors[index]
        else:
            tensor = torch.cat([rollout.tensors[index] for rollout in rollouts])
        return tensor if device is None else tensor.to(device)

    flat = {leaf.key: joined(index) for index, leaf in enumerate(layout.per_frame)}
    tails = [joined(num_frame_leaves + index) for index in range(num_carried)]
    final_start = num_frame_leaves + num_carried
    reward = flat["reward",]
    rows, steps = reward.shape
    final_at = _offset_cat([r.tensors[final_start] for r in rollouts], layout.num_envs * steps)

    following: dict[Key, torch.Tensor] = {}
    for index, leaf in enumerate(layout.carried):
        root = flat[leaf.key]
        after = torch.empty_like(root)
        after[:, :-1] = root[:, 1:]
        after[:, -1] = tails[index]
        if len(final_at):
            final = joined(final_start + 1 + index)
            after.view(rows * steps, *leaf.shape)[final_at.to(after.device)] = final
        following[leaf.key] = after

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1)

    terminated, truncated = flat["terminated",], flat["truncated",]
    following["reward",] = column(reward)
    following["terminated",] = column(terminated)
    following["truncated",] = column(truncated)
    following["done",] = column(terminated | truncated)
    batch = {leaf.key: flat[leaf.key] for leaf in layout.per_frame[: -len(_BOOKKEEPING)]}
    for name in ("done", "terminated", "truncated"):
        batch[name,] = torch.zeros((rows, steps, 1), dtype=torch.bool, device=reward.device)
    worker_ids = torch.tensor([r.header.worker_id for r in rollouts], device=reward.device)
    tree = nested(batch)
    tree["next"] = nested(following)
    tree["collector"] = {
        "traj_ids": flat["traj_ids",],
        "policy_version": flat["policy_version",],
        "worker_id": worker_ids.repeat_interleave(layout.num_envs)[:, None].repeat(1, steps),
    }
    out = TensorDict(tree, batch_size=[rows, steps], names=[None, "time"], device=device)
    if stack:
        return out.unflatten(0, (len(rollouts), layout.num_envs))
    return out.squeeze(0) if squeeze and rows == 1 else out


def _offset_cat(parts: Sequence[torch.Tensor], stride: int) -> torch.Tensor:
    return torch.cat([part + index * stride for index, part in enumerate(parts)])
