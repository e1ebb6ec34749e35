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
        self._mapped: dict[Segment, torch.Tensor] = {}

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

    def own(self, tensor: torch.Tensor | SharedTensor) -> torch.Tensor:
        """Return a tensor that was sent, or a copy of it if it lies there.

        Raises:
            OSError: the peer has ended, before any of that memory was mapped.
        """
        if isinstance(tensor, torch.Tensor):
            return tensor
        if tensor.segment not in self._mapped:
            self._mapped[tensor.segment] = map_segment(tensor.segment)
        return tensor_cache.copy_of(tensor.within(self._mapped[tensor.segment]))


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

        def copy_all() -> None:
            try:
                copies = [tensor if memory is None else memory.own(tensor) for tensor in sent]
            except OSError as cause:
                deliver(None, peer_is_gone(peer, cause))
            except Exception as cause:  # noqa: BLE001 - raised where the rollout is waited for
                deliver(None, cause)
            else:
                deliver(copies, None)

        shared = [tensor.nbytes for tensor in sent if isinstance(tensor, SharedTensor)]
        if sum(shared) > _COPIED_AT_ONCE_BYTES:
            self._thread.put(copy_all)
        else:
            copy_all()

    def close(self) -> None:
        """End after all that was to be delivered; don't wait for it."""
        self._thread.close()
