"""Tensors that arrive as a caller's own; those in the memory of a peer are copied from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distcollect.common import tensor_cache
from distcollect.common.memory_segment import Segment
from distcollect.common.shared_memory import SharedTensor, map_segment
from distcollect.common.threads import SerialThread
from distcollect.transport.pending_answers import peer_is_gone
from distcollect.transport.protocol import Deliver

# Copying less takes no longer than handing it to another thread.
_COPIED_AT_ONCE_BYTES = 512 * 1024


class PeerMemory:
    """The memory of a peer on this host, which can be mapped here."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}  # by the segment's name
        self._views: dict[tuple[str, int], torch.Tensor] = {}  # also by the offset

    @classmethod
    def of(cls, sample: Segment | None) -> PeerMemory | None:
        """Return the memory of the peer that gave ``sample``; None if it can't be mapped."""
        if sample is None:
            return None
        try:
            sample.open().close()
        except OSError:  # it is on another host, or may not be mapped
            return None
        return cls()

    def view(self, tensor: SharedTensor) -> torch.Tensor:
        """Return a tensor that lies there; a worker gives the same ones again and again.

        Raises:
            OSError: the peer has ended, before any of that memory was mapped.
        """
        segment, offset, _, _ = tensor
        view = self._views.get((segment.name, offset))
        if view is None:
            if segment.name not in self._mapped:
                self._mapped[segment.name] = map_segment(segment)
            view = tensor.within(self._mapped[segment.name])
            self._views[segment.name, offset] = view
        return view


class Copier:
    """Delivers rollouts, with copies of what of them lies in the memory of a peer."""

    def __init__(self) -> None:
        self._thread = SerialThread("distcollect-copy")

    def deliver(
        self, peer: int, memory: PeerMemory | None, sent: Sequence[Any], deliver: Deliver
    ) -> None:
        """Deliver a rollout.

        Args:
            peer: its worker.
            memory: the worker's; None: nothing of the rollout lies there.
            sent: tensors, and SharedTensors where they are to be copied.
            deliver: gets the tensors.
        """
        tensors, places, num_bytes = [*sent], [], 0
        try:
            for at, each in enumerate(sent):
                if memory is not None and isinstance(each, SharedTensor):
                    tensors[at] = memory.view(each)
                    places.append(at)
                    num_bytes += tensors[at].nbytes
        except OSError as cause:
            deliver(None, peer_is_gone(peer, cause))
            return

        def copy_all() -> None:
            try:
                for at in places:
                    tensors[at] = tensor_cache.copy_of(tensors[at])
            except Exception as cause:  # noqa: BLE001 - raised where the rollout is waited for
                deliver(None, cause)
            else:
                deliver(tensors, None)

        if num_bytes > _COPIED_AT_ONCE_BYTES:
            self._thread.put(copy_all)
        else:
            copy_all()

    def close(self) -> None:
        """End after all that was to be delivered; don't wait for it."""
        self._thread.close()
