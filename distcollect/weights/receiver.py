"""The weight plane's end at a worker: receives versions while the engine steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from distcollect.common.clock import clock_ns
from distcollect.common.threads import SerialThread
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import Wire, checksum
from distcollect.weights.updaters import WeightSource


@dataclass(frozen=True)
class Push:
    """What a receiver has to know of a push.

    Attributes:
        version: policy_version of these weights.
        source: where the payload is.
        wire: how the weights lie in the payload.
        num_bytes: the payload's size.
        checksum: the payload's, see :func:`~distcollect.policy.weight_layout.checksum`.
        base: the version that the entries in it are a change of, where these are not all.
    """

    version: int
    source: WeightSource
    wire: Wire
    num_bytes: int
    checksum: int
    base: int = 0


class WeightReceiver:
    """A worker's side: receives on a thread of its own while the engine steps."""

    def __init__(
        self, weights: LiveWeights, address: str, on_received: Callable[[int, int, int], None]
    ) -> None:
        """Receive for ``weights``.

        Args:
            weights: see there.
            address: this host's, on the interface to use.
            on_received: is told (version, begin, end) of those that came, in nanoseconds.
        """
        self._on_received = on_received
        self._weights = weights
        self._keep: dict[str, Any] = {"address": address}
        self._landing: dict[tuple[int, str], torch.Tensor] = {}
        self._thread = SerialThread("distcollect-weights")

    def ready(self, source: WeightSource | None = None) -> None:
        """Take part from now on in what ``source`` needs all receivers for."""
        if source is not None:
            source.join(self._keep)

    def give_up(self) -> None:
        """Wait no longer for what is under way: the sender broke it off."""
        for kept in list(self._keep.values()):
            if hasattr(kept, "close"):
                kept.close()

    def receive(self, push: Push) -> Future[int]:
        """Take part in a push; completes with the version once it is there, whole."""
        return self._thread.submit(self._receive, push)

    def close(self) -> None:
        """Receive nothing more."""
        self._thread.close()
        self.give_up()

    def _receive(self, push: Push) -> int:
        if push.wire.entries is not None and push.base != self._weights.newest:
            raise RuntimeError(
                f"version {push.version} came as a change of version {push.base}, but version "
                f"{self._weights.newest} is here"
            )
        begin = clock_ns()
        buffer = self._weights.spare()
        try:
            self._fill(buffer, push)
        except BaseException:
            self._weights.discard(buffer)
            self._landing.clear()  # as it may be written to yet, too
            raise
        self._weights.commit(buffer, push.version)
        self._on_received(push.version, begin, clock_ns())
        return push.version

    def _fill(self, buffer: torch.Tensor, push: Push) -> None:
        as_it_is = push.wire == Wire()
        payload = buffer
        if not as_it_is or (buffer.is_cuda and not push.source.on_gpu):
            payload = self._memory_for(push, buffer)
        push.source.receive(payload, self._keep)
        received = checksum(payload)
        if received != push.checksum:
            raise RuntimeError(
                f"version {push.version} arrived with checksum {received:#x} instead of "
                f"{push.checksum:#x}; it is not used"
            )
        if as_it_is:
            if payload is not buffer:
                buffer.copy_(payload)
            return
        if push.wire.entries is not None:
            self._weights.copy_newest(buffer)
        layout = self._weights.layout
        wired = layout.reduced(push.wire)
        wired.transfer(payload, buffer, layout)

    def _memory_for(self, push: Push, buffer: torch.Tensor) -> torch.Tensor:
        """Where the source can write to: pinned memory for a GPU's weights, if it can't itself."""
        device = buffer.device if push.source.on_gpu else torch.device("cpu")
        key = (push.num_bytes, str(device))
        if key not in self._landing:
            self._landing.clear()
            self._landing[key] = torch.empty(
                push.num_bytes,
                dtype=torch.uint8,
                device=device,
                pin_memory=buffer.is_cuda and device.type == "cpu",
            )
        return self._landing[key]
