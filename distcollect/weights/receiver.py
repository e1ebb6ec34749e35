"""A worker's side of the weights: receives versions while the engine steps."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from distcollect.common.clock import clock_ns
from distcollect.common.threads import SerialThread
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import checksum
from distcollect.transport.worker_service import Push, WeightSource


class WeightReceiver:
    """Receives versions into spare buffers, on a thread of its own."""

    def __init__(
        self, weights: LiveWeights, address: str, on_received: Callable[[int, int, int], None]
    ) -> None:
        """Receive for ``weights``.

        Args:
            weights: what the engine computes with.
            address: this host's, on the interface to use.
            on_received: called with (version, begin, end) of each version received; times in
                nanoseconds.
        """
        self._on_received = on_received
        self._weights = weights
        self._state: dict[str, Any] = {"address": address}  # what sources keep
        self._landing = torch.empty(0, dtype=torch.uint8)  # for payloads that are to be unpacked
        self._newest = 0  # fingerprint of the newest version, as it came, if changes may follow
        self._generation = 0  # how often versions were renumbered
        self._lock = threading.Lock()  # of that, and of the version's number
        self._thread = SerialThread("distcollect-weights")

    def prepare(self, source: WeightSource | None = None) -> None:
        """Join the group that ``source`` names, if any; see :meth:`.WeightSource.join`."""
        if source is not None:
            source.join(self._state)

    def cancel(self) -> None:
        """Wait no longer for what is being received: the sender broke it off."""
        for kept in list(self._state.values()):
            if hasattr(kept, "close"):
                kept.close()

    def renumber(self, version: int, generation: int) -> None:
        """Continue an earlier run: the weights that are here now are ``version``.

        A push from before is refused from now on; if one of the new numbers has come already, it
        stays. To be called on the thread that steps the envs.
        """
        with self._lock:
            if generation > self._generation:
                self._generation = generation
                self._weights.renumber(version)

    def receive(self, push: Push) -> Future[WeightSource | None]:
        """Receive a version; see :meth:`.WorkerService.receive_weights`."""
        return self._thread.submit(self._receive, push)

    def close(self) -> None:
        """Receive nothing more."""
        self._thread.close()
        self.cancel()

    def _receive(self, push: Push) -> WeightSource | None:
        if push.encoding.entries is not None and push.base != self._weights.newest:
            raise RuntimeError(
                f"version {push.version} came as a change of version {push.base}, but this worker "
                f"has version {self._weights.newest}"
            )
        begin = clock_ns()
        buffer, arrived = self._weights.spare(), push.source.arrived
        if arrived is not None and push.encoding.is_whole and not buffer.is_cuda:
            self._weights.discard(buffer)
            buffer = arrived  # without a copy
        try:
            place = self._fill(buffer, push)
            came = _fingerprint(buffer) if push.changes_follow else 0
            self._commit(buffer, push)
            self._newest = came
        except BaseException:
            self._weights.discard(buffer)
            self._landing = self._landing[:0]  # the source may go on writing to it
            raise
        self._on_received(push.version, begin, clock_ns())
        return place

    def _commit(self, buffer: torch.Tensor, push: Push) -> None:
        with self._lock:
            if push.generation < self._generation:
                raise RuntimeError(
                    f"version {push.version} was published before versions were renumbered"
                )
            self._generation = push.generation
            self._weights.commit(buffer, push.version)

    def _fill(self, buffer: torch.Tensor, push: Push) -> WeightSource | None:
        layout = self._weights.layout
        sent = layout.reduced(push.encoding)
        is_whole = push.encoding.is_whole
        payload = buffer
        if not is_whole or (buffer.is_cuda and not push.source.on_gpu):
            device = buffer.device if push.source.on_gpu else torch.device("cpu")
            if (len(self._landing), self._landing.device) != (sent.num_bytes, device):
                self._landing = sent.empty(device)
            payload = self._landing
        place = push.source.receive(payload, self._state)
        received = checksum(payload)
        if received != push.checksum:
            raise RuntimeError(
                f"version {push.version} arrived with checksum {received:#x} instead of "
                f"{push.checksum:#x}; it is not used"
            )
        if push.encoding.entries is not None:
            self._weights.copy_newest(buffer)
            if _fingerprint(buffer) != self._newest:
                raise RuntimeError(
                    f"version {push.version} came as a change of version {push.base}, but the "
                    "policy has changed its parameters itself since then"
                )
        if not is_whole:
            sent.transfer(payload, buffer, layout)
        elif payload is not buffer:
            buffer.copy_(payload)
        if buffer.is_cuda:
            # The thread that steps the envs reads it, perhaps with another stream.
            torch.cuda.current_stream(buffer.device).synchronize()
        return place


def _fingerprint(flat: torch.Tensor) -> int:
    """Shows whether the policy has changed a version, also if it has only swapped some values.

    It can't where weights are on a GPU: there they are copied into the policy.
    """
    return 0 if flat.is_cuda else zlib.crc32(flat.numpy().data)
