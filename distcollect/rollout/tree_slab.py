"""The memory that a worker writes the frames of TorchRL envs into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from distcollect.rollout.layout import Layout
from distcollect.rollout.slab import RolloutMemory
from distcollect.rollout.spaces import Key, Leaf, dtype_name


class FrameSlab(RolloutMemory):
    """Memory for one rollout of TorchRL envs.

    Attributes:
        reward: float64 ``[n, T]``; for statistics.
        ended: bool ``[n, T]``: the trajectory ends here.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool | None = False) -> None:
        super().__init__(layout, num_steps, shared=shared)
        self._rows = layout.num_envs
        self.reward = np.zeros((self._rows, num_steps))
        self.ended = np.zeros((self._rows, num_steps), bool)

    def clear(self) -> None:
        super().clear()
        self.ended.fill(False)

    @abstractmethod
    def write(self, start: int, frames: Sequence[TensorDictBase], given: set[Key]) -> None:
        """Write the frames of consecutive steps.

        Args:
            start: the first of the steps.
            frames: the TensorDict of each step, with its "next".
            given: keys of the entries that earlier frames had; those that these have are added.

        Raises:
            ValueError: an entry has another shape than in the layout or values that its dtype has
                not, or a frame lacks it though others have it; names it.
        """

    def finish(self, num_steps: int) -> None:
        """All frames of the rollout are written.

        Args:
            num_steps: how many steps; all later ones are padding: zeros, or the last frame again,
                except that the trajectory id is -1 and the policy version that of the last step.
        """
        if num_steps < self.num_steps:
            for row in range(self._rows):
                self._pad_row(row, num_steps, self.policy_version[row, num_steps - 1])
            self.reward[:, num_steps:] = 0
            self.num_frames = self._rows * num_steps


class TreeSlab(FrameSlab):
    """Writes frames whose entries are tensors of fixed shapes.

    They arrive as the TensorDicts of several steps at once, since stacking a leaf of many steps
    takes as long as writing it for one. A leaf that is at the root and under "next" is kept once:
    usually its value under "next" equals that at the next root. Where it does not, as at the end of
    an episode, its value is kept in addition.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool | None = False) -> None:
        super().__init__(layout, num_steps, shared=shared)
        self._last: dict[Key, torch.Tensor] = {}  # the state leaves after the last step

    def clear(self) -> None:
        super().clear()
        self._last.clear()

    def write(self, start: int, frames: Sequence[TensorDictBase], given: set[Key]) -> None:
        if not frames:
            return
        layout, reader = self.layout, _Reader(frames)
        before, self._last = self._last, {}
        count = len(frames)
        begins = self._begins(start, count)

        def read(key: Key, *, at: Sequence[bool] = ()) -> list[torch.Tensor] | None:
            return self._complete(key, reader.values(key), at=at, given=given)

        following: dict[Key, torch.Tensor] = {}
        differs: torch.Tensor | None = None
        for leaf in layout.state:
            root = self._put(leaf, start, count, read(leaf.key, at=begins))
            after = self._stacked(leaf, count, read(("next", *leaf.key)))
            self._last[leaf.key] = after[:, -1]
            # The values after each step but the last, and after the step before the first.
            if leaf.key in before:
                after = torch.cat([before[leaf.key].unsqueeze(1), after[:, :-1]], dim=1)
            else:
                after, root = after[:, :-1], root[:, 1:]
            following[leaf.key] = after
            unequal = (after != root).flatten(2).any(-1) if leaf.shape else after != root
            differs = unequal if differs is None else differs | unequal
        first = start - 1 if before else start
        if differs is not None and differs.any():
            self._keep(differs.nonzero(), first, following)
        for leaf in layout.extras:
            self._put(leaf, start, count, read(leaf.key))
        for leaf in layout.outcomes:
            self._put(leaf, start, count, read(("next", *leaf.key)))
        self._add_rewards(start, count)

    def finish(self, num_steps: int) -> None:
        if num_steps == self.num_steps:
            for key, tail in self.tails.items():
                tail.copy_(self._last[key])
            return
        at = torch.tensor([[row, 0] for row in range(self._rows)])
        after = {key: value.unsqueeze(1) for key, value in self._last.items()}
        self._keep(at, num_steps - 1, after)
        super().finish(num_steps)

    def _begins(self, start: int, count: int) -> list[bool]:
        """For each of the steps, whether a trajectory may begin with it."""
        ids = self.traj_ids[:, max(start - 1, 0) : start + count]
        changes: list[bool] = (ids[:, 1:] != ids[:, :-1]).any(0).tolist()
        return changes if start else [True, *changes]

    def _complete(
        self,
        key: Key,
        values: list[torch.Tensor | None],
        *,
        at: Sequence[bool],
        given: set[Key],
    ) -> list[torch.Tensor] | None:
        """An entry of consecutive steps, with zeros where it may be missing.

        Args:
            key: the entry's key.
            values: of each step; None where it is missing.
            at: for each step, whether it may be missing there: what only steps give is missing
                after a reset. Empty: nowhere.
            given: the entries that earlier frames had; it may be missing everywhere if it is not
                among them. It is added if it was found.

        Returns:
            None if it is missing everywhere.

        Raises:
            ValueError: it is missing where it may not be.
        """
        found = [value for value in values if value is not None]
        if len(found) == len(values):
            given.add(key)
            return found
        may_lack = [value is not None or may for value, may in zip(values, at, strict=False)]
        if (found or key in given) and not (may_lack and all(may_lack)):
            raise ValueError(f"a frame has no entry {'.'.join(key)!r}, though other frames have it")
        if not found:
            return None
        given.add(key)
        zeros = torch.zeros_like(found[0])
        return [zeros if value is None else value for value in values]

    def _put(
        self, leaf: Leaf, start: int, count: int, values: list[torch.Tensor] | None
    ) -> torch.Tensor:
        """Write a leaf of ``count`` steps to its column; what was written, ``[n, count, *shape]``.

        Args:
            leaf: the leaf.
            start: the first of the steps.
            count: number of steps.
            values: of each step; None: zeros, as for what the policy writes in random steps.
        """
        part = self.columns[leaf.key][:, start : start + count]
        return part.copy_(self._stacked(leaf, count, values))

    def _stacked(self, leaf: Leaf, count: int, values: list[torch.Tensor] | None) -> torch.Tensor:
        """``[n, count, *shape]`` in new memory; see :meth:`_put`."""
        shape = (self._rows, count, *leaf.shape)
        if values is None:
            return torch.zeros(shape, dtype=leaf.dtype)
        # A policy's action and a random one may differ in dimensions of size 1.
        if _without_ones(values[0].shape) != _without_ones((*self.layout.batch_size, *leaf.shape)):
            raise self._error(leaf, values)
        try:
            stacked = torch.stack(values, len(self.layout.batch_size))
        except RuntimeError as error:
            raise self._error(leaf, values) from error
        stacked = stacked.reshape(shape).cpu()
        converted = stacked.to(leaf.dtype)
        if stacked.dtype is not leaf.dtype:
            may_round = torch.can_cast(stacked.dtype, leaf.dtype)
            lost = converted.isinf() & stacked.isfinite() if may_round else converted != stacked
            if lost.any():
                raise self._error(leaf, values)
        return converted

    def _error(self, leaf: Leaf, values: Sequence[torch.Tensor]) -> ValueError:
        name, expected = ".".join(leaf.key), [*self.layout.batch_size, *leaf.shape]
        for value in values:
            if (found := list(value.shape)) != expected:
                return ValueError(
                    f"the entry {name!r} has shape {found}, but before it had {expected}"
                )
        other = next((v.dtype for v in values if v.dtype is not leaf.dtype), leaf.dtype)
        return ValueError(
            f"the entry {name!r} has values of {dtype_name(other)} that can't be written as "
            f"{dtype_name(leaf.dtype)}, its dtype in the spec or at the first reset"
        )

    def _keep(self, at: torch.Tensor, first: int, values: dict[Key, torch.Tensor]) -> None:
        """Keep values under "next" that differ from those at the next root.

        Args:
            at: int64 ``[k, 2]``: row, and index in ``values``.
            first: the step of the first values.
            values: ``[n, m, *shape]`` for each state leaf.
        """
        rows, steps = at.unbind(1)
        self._final_at += (rows * self.num_steps + first + steps).tolist()
        for key, kept in self._final.items():
            kept.append(values[key][rows, steps].flatten().view(torch.uint8).numpy())

    def _add_rewards(self, start: int, num_steps: int) -> None:
        total = self.reward[:, start : start + num_steps]
        total.fill(0.0)
        assert self.layout.torchrl_keys is not None
        for key in self.layout.torchrl_keys.rewards:
            part = self.columns[key][:, start : start + num_steps]
            total += part.reshape(self._rows, num_steps, -1).sum(-1, dtype=torch.float64).numpy()


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class _Reader:
    """Reads entries of several TensorDicts of the same structure.

    The entries of each TensorDict are taken at once, which is several times faster than ``get``.
    """

    def __init__(self, frames: Sequence[TensorDictBase]) -> None:
        try:
            roots = [dict(frame.items()) for frame in frames]
        except RuntimeError as error:  # a lazy stack of envs that differ
            raise ValueError(
                "an entry has another shape in one env than in the next, in the same step, though "
                "their specs give it one shape: give it a size of -1 in the spec"
            ) from error
        self._nodes: dict[Key, list[dict[str, Any]]] = {(): roots}

    def values(self, key: Key) -> list[Any]:
        """The entry in each TensorDict; None where one lacks it."""
        return [node.get(key[-1]) for node in self._node(key[:-1])]

    def _node(self, key: Key) -> list[dict[str, Any]]:
        if key not in self._nodes:
            values = self.values(key)
            self._nodes[key] = [{} if v is None else dict(v.items()) for v in values]
        return self._nodes[key]
