"""The memory that a worker writes a rollout into.

Its tensors are what travels: each observation once. ``next`` observations are rebuilt on the
trainer (:mod:`.assemble`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.spaces import Arrays, Key
from distcollect.rollout.wire import WireForm, wire_layout


class Slab:
    """Memory for one rollout ``[n, T]``, written in place by the engine, used again and again.

    Torch owns the memory, as the RPC layer would copy numpy's once more before sending it. It is
    written through numpy views, as small writes through torch take many times longer.

    Attributes:
        wire_form: how its leaves lie in the tensors that travel.
        frames: ``{key: [n, T, *shape]}`` of all leaves; the next four are parts of it.
        root: the state leaves, as they are at the start of each frame.
        action: the action's leaves.
        extras: what the policy writes beside the action.
        outcomes: the leaves that only a frame's end has.
        tail: ``{key: [n, *shape]}`` of the state leaves after the last frame.
        num_frames: how many frames in it are real; the others are padding.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool = False) -> None:
        """Allocate it; ``shared``: in memory that a trainer on this host can map."""
        self.layout = layout
        self.num_steps = num_steps
        self.shared = shared
        self.wire_form = WireForm.MAPPED if shared else WireForm.PACKED
        self._wire = wire_layout(layout, num_steps, self.wire_form)
        self._memory, self._stand_ins = self._wire.allocate()
        arrays = [leaf.numpy() for leaf in self._wire.leaves(self._memory)]
        per_frame = layout.per_frame
        self.frames: Arrays = {
            leaf.key: array for leaf, array in zip(per_frame, arrays, strict=False)
        }
        self.tail: Arrays = {
            leaf.key: array
            for leaf, array in zip(layout.state, arrays[len(per_frame) :], strict=True)
        }
        self.root: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.state}
        self.action: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.action}
        self.extras: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.extras}
        self.outcomes: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.outcomes}
        self.reward = self.frames["reward",]
        self.terminated = self.frames["terminated",]
        self.truncated = self.frames["truncated",]
        self.traj_ids = self.frames[TRAJ_IDS]
        self.policy_version = self.frames[POLICY_VERSION]
        self.faulted = self.frames[FAULTED]
        self.num_frames = layout.num_envs * num_steps
        self._final_at: list[int] = []
        self._final_room = layout.num_envs
        self._final: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.state}

    @property
    def ended(self) -> np.ndarray:
        """Bool ``[n, T]``: the trajectory ends here."""
        ended: np.ndarray = self.terminated | self.truncated
        return ended

    def local_tensors(self) -> list[Any]:
        """The rollout for a trainer in this process; see :meth:`tensors`."""
        return self.tensors()

    def clear(self) -> None:
        """Reset what the engine doesn't write in each frame: episode ends, padding."""
        self.num_frames = self.layout.num_envs * self.num_steps
        self.terminated.fill(False)
        self.truncated.fill(False)
        self.faulted.fill(False)
        self._final_at.clear()

    def add_final(
        self, row: int, step: int, final: Arrays, *, source_row: int | None = None
    ) -> None:
        """Keep the true final observation of the episode that ended in ``row`` at ``step``.

        Args:
            row: the env's row.
            step: the episode's last step in this rollout.
            final: ``{key: [m, *shape]}`` of the state leaves after that step.
            source_row: the env's row in ``final``; None: the same row.
        """
        count = len(self._final_at)
        source = row if source_row is None else source_row
        self._make_room(count + 1)
        for key, kept in self._final.items():
            kept[count] = final[key][source]
        self._final_at.append(row * self.num_steps + step)

    def add_finals(self, rows: np.ndarray, steps: int | np.ndarray, final: Arrays) -> None:
        """The same for several rows at once.

        Args:
            rows: m rows, each at most once for the same step.
            steps: the last step of all of them, or of each.
            final: ``{key: [m, *shape]}`` of the state leaves after these steps.
        """
        begin = len(self._final_at)
        end = begin + len(rows)
        self._make_room(end)
        for key, kept in self._final.items():
            kept[begin:end] = final[key]
        self._final_at += (rows * self.num_steps + steps).tolist()

    def _make_room(self, count: int) -> None:
        """Make room for as many final observations."""
        if count <= self._final_room:
            return
        more = max(count - self._final_room, self._final_room)
        self._final_room += more
        for key, kept in self._final.items():
            room = np.zeros((more, *kept.shape[1:]), kept.dtype)
            self._final[key] = np.concatenate([kept, room])

    def values_at(self, key: Key, at: np.ndarray) -> np.ndarray:
        """One number of each of k frames, float64 ``[k]``.

        Args:
            key: as in a batch, of a leaf with one number per frame.
            at: int64 ``[k]``, the frames' ``row * T + step``.
        """
        rows, steps = self.layout.num_envs, self.num_steps
        if key[0] != "next":
            values = self.frames[key].reshape(rows * steps)
        elif key[1:] not in self.root:
            values = self.frames[key[1:]].reshape(rows * steps)
        else:
            root = self.root[key[1:]].reshape(rows, steps)
            after = np.concatenate([root[:, 1:], self.tail[key[1:]].reshape(rows, 1)], axis=1)
            values = after.reshape(rows * steps)
            count = len(self._final_at)
            values[self._final_at] = self._final[key[1:]][:count].reshape(count)
        chosen: np.ndarray = values[at].astype(np.float64)
        return chosen

    def pad(self, lengths: np.ndarray, after: Arrays) -> None:
        """Turn all frames after the first ``lengths`` of each row into padding.

        Padding is zeros, except that the trajectory id is -1 and the policy version is that of the
        row's last real frame.

        Args:
            lengths: int ``[n]``, how many frames of each row are real; not all 0.
            after: ``{key: [n, *shape]}`` of the state leaves after each row's last real frame.
        """
        steps = self.num_steps
        newest = self.policy_version[np.arange(steps) < lengths[:, None]].max()
        for row, length in enumerate(lengths.tolist()):
            if length == steps:
                continue
            version = self.policy_version[row, length - 1] if length else newest
            ended = self.terminated[row, length - 1] or self.truncated[row, length - 1]
            if length and not ended:
                self.add_final(row, length - 1, after)
            for array in self.frames.values():
                array[row, length:] = 0
            for array in self.tail.values():
                array[row] = 0
            self.traj_ids[row, length:] = -1
            self.policy_version[row, length:] = version
        self.num_frames = int(lengths.sum())

    def tensors(self, *, mapped: bool = True) -> list[Any]:
        """The rollout as it travels; this slab's memory, so valid until it is used again.

        Args:
            mapped: the receiver can map shared memory. Then a shared slab gives
                :class:`~distcollect.common.shared_memory.SharedTensor` in place of all tensors but
                the first.
        """
        packed, *large = self._memory
        if self._final_at:
            final = (kept[: len(self._final_at)] for kept in self._final.values())
            packed = self._wire.with_final(packed, self._final_at, final)
        return [packed, *(self._stand_ins if mapped and self._stand_ins else large)]
