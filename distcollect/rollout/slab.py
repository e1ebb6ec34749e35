"""The memory that a worker writes a rollout into.

Its tensors are what travels: each observation once. ``next`` observations are rebuilt on the
trainer (:mod:`.assemble`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distcollect.common.cgroups import check_free
from distcollect.common.refusing import refusing
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.spaces import Arrays, Key, indexable
from distcollect.rollout.wire import WireForm, wire_layout

# One array operation is faster than a loop over at least this many rows.
MANY_ROWS = 16


class RolloutMemory:
    """Memory for one rollout ``[n, T]``, used again and again.

    Attributes:
        wire_form: how its leaves lie in the tensors that travel.
        columns: ``{key: [n, T, *shape]}`` of all leaves.
        tails: ``{key: [n, *shape]}`` of the state leaves after the last frame.
        traj_ids, policy_version: int64 ``[n, T]``.
        faulted: bool ``[n, T]``: the trajectory ends here because its env raised.
        reward: ``[n, T]``, the sum of all rewards of a row.
        num_frames: how many frames in it are real; the others are padding.
    """

    reward: np.ndarray

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool | None = False) -> None:
        """Allocate it; ``shared``: see :func:`~distcollect.rollout.slabs.new_slab`."""
        self.layout = layout
        self.num_steps = num_steps
        self.shared = shared
        self.wire_form = WireForm.MAPPED if shared else WireForm.LOCAL
        if layout.is_loose or shared is False:
            self.wire_form = WireForm.PACKED
        self._wire = wire_layout(layout, num_steps, self.wire_form)
        takes = f"a rollout of {num_steps:,} steps takes {self._wire.num_bytes / 1e9:,.1f} GB"
        with refusing(takes, "take a smaller frames_per_batch, or more workers", Exception):
            check_free(self._wire.num_bytes)
            self._memory, self._shared = self._wire.allocate()
        tensors = self._wire.leaves(self._memory)
        per_frame = layout.per_frame
        self.columns = {leaf.key: t for leaf, t in zip(per_frame, tensors, strict=False)}
        tails = tensors[len(per_frame) :]
        self.tails = {leaf.key: t for leaf, t in zip(layout.state, tails, strict=True)}
        self.traj_ids: np.ndarray = self.columns[TRAJ_IDS].numpy()
        self.policy_version: np.ndarray = self.columns[POLICY_VERSION].numpy()
        self.faulted: np.ndarray = self.columns[FAULTED].numpy()
        self.num_frames = layout.num_envs * num_steps
        # Where trajectories ended, as row times T plus step; and of each state leaf the bytes of
        # the values ``[k, *shape]`` after these frames, in parts.
        self._final_at: list[int] = []
        self._final: dict[Key, list[Any]] = {leaf.key: [] for leaf in layout.state}

    def clear(self) -> None:
        """Reset what the engine doesn't write in each frame."""
        self.num_frames = self.layout.num_envs * self.num_steps
        self.faulted.fill(False)
        self._final_at.clear()
        for kept in self._final.values():
            kept.clear()

    def values_at(self, key: Key, at: np.ndarray) -> np.ndarray:
        """One number of each of k frames, float64 ``[k]``.

        Args:
            key: as in a batch, of a leaf with one number per frame.
            at: int64 ``[k]``, the frames' ``row * T + step``.
        """
        rows, steps = self.layout.num_envs, self.num_steps
        if key[0] != "next":
            values = self.columns[key].reshape(-1)
        elif key[1:] not in self.tails:
            values = self.columns[key[1:]].reshape(-1)
        else:
            root, tail = self.columns[key[1:]], self.tails[key[1:]]
            values = torch.cat([root.reshape(rows, steps)[:, 1:], tail.reshape(rows, 1)], 1)
            values = indexable(values.reshape(-1))
            if self._final_at:
                final = torch.frombuffer(bytearray().join(self._final[key[1:]]), dtype=root.dtype)
                values[self._final_at] = indexable(final)
            values = values.view(root.dtype)
        chosen: np.ndarray = values.double()[torch.from_numpy(at)].numpy()
        return chosen

    def local_tensors(self) -> list[Any]:
        """The rollout for a trainer in this process; see :meth:`tensors`."""
        return self.tensors()

    def tensors(self, *, mapped: bool = True) -> list[Any]:
        """The rollout as it travels; this slab's memory, so valid until it is used again.

        Args:
            mapped: the receiver can map shared memory. Then a shared slab gives one
                :class:`~distcollect.common.shared_memory.SharedTensors` in place of all tensors but
                the first.
        """
        packed, *large = self._memory
        if self._final_at:
            packed = self._wire.with_final(packed, self._final_at, self._final.values())
        return [packed, *([self._shared] if mapped and self._shared else large)]

    def _pad_row(self, row: int, length: int, version: int) -> None:
        """Turn the frames of a row from ``length`` on into padding.

        Padding is zeros, except that the trajectory id is -1, and the policy version as given.
        """
        for column in self.columns.values():
            column[row, length:].zero_()
        for tail in self.tails.values():
            tail[row].zero_()
        self.traj_ids[row, length:] = -1
        self.policy_version[row, length:] = version


class Slab(RolloutMemory):
    """Memory for one rollout, written in place by way of arrays.

    Torch owns the memory, as the RPC layer would copy numpy's once more before sending it. It is
    written through numpy views, as small writes through torch take many times longer.

    Attributes:
        frames: ``columns`` as arrays; the next four are parts of it.
        root: the state leaves, as they are at the start of each frame.
        action: the action's leaves.
        extras: what the policy writes beside the action.
        outcomes: the leaves that only a frame's end has.
        by_step: ``{key: [T, n, *shape]}``, ``frames`` with the steps first: a step is found in half
            the time.
        tail: ``tails`` as arrays.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool | None = False) -> None:
        super().__init__(layout, num_steps, shared=shared)
        self.frames: Arrays = {key: column.numpy() for key, column in self.columns.items()}
        self.by_step: Arrays = {key: each.swapaxes(0, 1) for key, each in self.frames.items()}
        self.tail: Arrays = {key: tail.numpy() for key, tail in self.tails.items()}
        self.root, self.action, self.extras, self.outcomes = (
            {leaf.key: self.frames[leaf.key] for leaf in leaves}
            for leaves in (layout.state, layout.action, layout.extras, layout.outcomes)
        )
        self.reward = self.frames["reward",]
        self.terminated = self.frames["terminated",]
        self.truncated = self.frames["truncated",]

    @property
    def ended(self) -> np.ndarray:
        """Bool ``[n, T]``: the trajectory ends here."""
        ended: np.ndarray = self.terminated | self.truncated
        return ended

    def clear(self) -> None:
        super().clear()
        self.terminated.fill(False)
        self.truncated.fill(False)

    def add_finals(self, rows: np.ndarray, steps: int | np.ndarray, final: Arrays) -> None:
        """Keep the true final observations of m episodes.

        Args:
            rows: m rows, each at most once for the same step.
            steps: the last step of all of them, or of each.
            final: ``{key: [m, *shape]}`` of the state leaves after these steps.
        """
        for key, kept in self._final.items():
            kept.append(final[key].tobytes())
        self._final_at += (rows * self.num_steps + steps).tolist()

    def end(self, rows: Sequence[int], step: int, final: Arrays) -> None:
        """Episodes end in ``rows`` with this step; ``final``: the state leaves of all rows then."""
        if len(rows) >= MANY_ROWS:
            self.add_finals(np.array(rows), step, {k: each[rows] for k, each in final.items()})
            return
        for row in rows:  # in a hot loop: by what a step does anyway, as all else takes long
            self._final_at.append(row * self.num_steps + step)
            for key, kept in self._final.items():
                kept.append(final[key][row].tobytes())

    def finals(self) -> tuple[np.ndarray, np.ndarray, Arrays]:
        """Return rows and steps, int64 ``[k]``, and the state leaves after them that were kept."""
        rows, steps = np.divmod(np.array(self._final_at, np.int64), self.num_steps)
        final: Arrays = {}
        for key, parts in self._final.items():
            column = self.frames[key]
            shape = (len(rows), *column.shape[2:])
            final[key] = np.ndarray(shape, column.dtype, bytearray().join(parts))
        return rows, steps, final

    def pad(self, lengths: np.ndarray, after: Arrays) -> None:
        """Turn all frames after the first ``lengths`` of each row into padding.

        The policy version of padding is that of the row's last real frame.

        Args:
            lengths: int ``[n]``, how many frames of each row are real; not all 0.
            after: ``{key: [n, *shape]}`` of the state leaves after each row's last real frame.
        """
        newest = self.policy_version[np.arange(self.num_steps) < lengths[:, None]].max()
        ended = self.ended
        for row, length in enumerate(lengths.tolist()):
            if length == self.num_steps:
                continue
            if length and not ended[row, length - 1]:
                final = {key: array[row : row + 1].copy() for key, array in after.items()}
                self.add_finals(np.array([row]), length - 1, final)
            self._pad_row(row, length, self.policy_version[row, length - 1] if length else newest)
        self.num_frames = int(lengths.sum())
