"""Tensors that arrive as a caller's own; those in the memory of a peer are copied from there."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from distcollect.common import tensor_cache
from distcollect.common.memory_segment import Segment
from distcollect.common.shared_memory import SharedTensor, SharedTensors, map_segment
from distcollect.common.threads import SerialThread
from distcollect.transport.pending_answers import peer_is_gone
from distcollect.transport.protocol import Deliver

# Copying less takes no longer than handing it to another thread.
_COPIED_AT_ONCE_BYTES = 512 * 1024


class PeerMemory:
    """The memory of a peer on this host, which can be mapped here."""

    def __init__(self) -> None:
        self._views: dict[str, list[torch.Tensor]] = {}  # by the name of the memory

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

    def views(self, shared: SharedTensors) -> list[torch.Tensor]:
        """Return the tensors that lie there; a worker gives the same ones again and again.

        Raises:
            OSError: the peer has ended, before any of that memory was mapped.
        """
        if shared.name not in self._views:
            places: list[SharedTensor] = pickle.loads(shared.places)
            memory = map_segment(places[0].segment)
            self._views[shared.name] = [place.within(memory) for place in places]
        return self._views[shared.name]


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
            sent: tensors; the last may be SharedTensors that are to be copied.
            deliver: gets the tensors.
        """
        *own, shared = sent
        if memory is None or not isinstance(shared, SharedTensors):
            deliver([*sent], None)
            return
        try:
            views = memory.views(shared)
        except OSError as cause:
            deliver(None, peer_is_gone(peer, cause))
            return

        def copy_all() -> None:
            try:
                tensors = [*own, *map(tensor_cache.copy_of, views)]
            except Exception as cause:  # noqa: BLE001 - raised where the rollout is waited for
                deliver(None, cause)
            else:
                deliver(tensors, None)

        if shared.nbytes > _COPIED_AT_ONCE_BYTES:
            self._thread.put(copy_all)
        else:
            copy_all()

    def close(self) -> None:
        """End after all that was to be delivered; don't wait for it."""
        self._thread.close()
