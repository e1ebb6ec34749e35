"""The data contract: how frames lie in a worker's memory, on the wire, and in a batch.

A worker writes frames into a :class:`Slab`, whose tensors are what travels: each observation once.
:func:`assemble` turns the tensors of one or more rollouts into the batch that the user gets, with
TorchRL's keys, rebuilding what follows from the rest (``next`` observations, ``done``, ids).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distcollect.rollout.layout import (
    FAULTED,
    POLICY_VERSION,
    TRAJ_IDS,
    Layout,
)
from distcollect.rollout.spaces import Arrays
from distcollect.rollout.wire import (
    wire_of,
)


class Slab:
    """Memory for one rollout ``[n, T]``, written in place by the engine, used again and again.

    The memory is torch's own (the RPC layer would copy memory that numpy owns once more before
    sending it) and is written through numpy views, which cost a fraction per small write.

    Attributes:
        frames: ``{key: [n, T, *shape]}`` of all leaves; the next ones are parts of it.
        root: of the carried leaves, as they are at the start of each frame.
        action: of the action's leaves.
        extras: of what the policy writes beside the action.
        outcomes: of the leaves that only a frame's end has.
        tail: ``{key: [n, *shape]}`` of the carried leaves after the last frame.
        num_frames: how many frames in it are real; the others are padding.
    """

    def __init__(self, layout: Layout, num_steps: int, *, shared: bool = False) -> None:
        """Allocate it; ``shared``: such that a trainer on this host can map it."""
        self.layout = layout
        self.num_steps = num_steps
        self.shared = shared
        self._wire = wire_of(layout, num_steps, mapped=shared)
        self._memory, self._stand_ins = self._wire.allocate()
        arrays = [leaf.numpy() for leaf in self._wire.leaves(self._memory)]
        per_frame = layout.per_frame
        self.frames: Arrays = {
            leaf.key: array for leaf, array in zip(per_frame, arrays, strict=False)
        }
        self.tail: Arrays = {
            leaf.key: array
            for leaf, array in zip(layout.carried, arrays[len(per_frame) :], strict=True)
        }
        self.root: Arrays = {leaf.key: self.frames[leaf.key] for leaf in layout.carried}
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
        self._final: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.carried}

    def clear(self) -> None:
        """Forget what the engine doesn't write in each frame: episode ends, padding."""
        self.num_frames = self.layout.num_envs * self.num_steps
        self.terminated.fill(False)
        self.truncated.fill(False)
        self.faulted.fill(False)
        self._final_at.clear()

    def add_final(
        self, row: int, step: int, final: Arrays, *, source_row: int | None = None
    ) -> None:
        """Keep the true final observation of the episode that ended in ``row`` at ``step``.

        It stands in the same row of ``final``, or in ``source_row``.
        """
        count = len(self._final_at)
        source = row if source_row is None else source_row
        if count == self._final_room:
            self._final_room *= 2
            for key, kept in self._final.items():
                self._final[key] = np.concatenate([kept, np.zeros_like(kept)])
        for key, kept in self._final.items():
            kept[count] = final[key][source]
        self._final_at.append(row * self.num_steps + step)

    def pad(self, lengths: np.ndarray, after: Arrays) -> None:
        """Make padding of all but the first frames of each row.

        That is zeros, with -1 for a trajectory id, and the version of the row's last frame.

        Args:
            lengths: int ``[n]``, how many frames of each row are real; of one at least.
            after: ``{key: [n, *shape]}`` of the carried leaves, after the last of them.
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
        """The rollout as it travels: tensors, or SharedTensors in place of all but the first.

        They are this slab's memory: valid until it is used again.

        Args:
            mapped: whoever gets them can map shared memory; False: tensors in any case.
        """
        packed, *large = self._memory
        if self._final_at:
            final = (kept[: len(self._final_at)] for kept in self._final.values())
            packed = self._wire.with_final(packed, self._final_at, final)
        return [packed, *(self._stand_ins if mapped and self._stand_ins else large)]
