"""Ways for new weights to get from the trainer to its workers.

The sender (:mod:`.weights`) decides who gets which version and when; an updater moves the bytes.
On the trainer it says for each receiver where that finds them: its :class:`WeightSource`, which
travels there and writes them into memory that the receiver has ready.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distcollect.common.shared_memory import Segment, SharedTensor, allocate
from distcollect.transport.worker_service import WeightSource


@dataclass(frozen=True)
class UpdaterContext:
    """What an updater has to know of the run.

    Attributes:
        address: of the trainer's host, on the interface by which workers reach it.
        timeout_s: for each wait.
        gpus: worker_id to a name of the GPU that has its policy, "" for the CPU.
        is_near: whether a peer is on the trainer's host, and can map its memory.
    """

    address: str
    timeout_s: float
    gpus: Mapping[int, str]
    is_near: Callable[[int], bool] = lambda _: False


class WeightUpdaterBase(ABC):
    """Moves weights from the trainer to workers; derive from it to do that in a way of your own.

    For each push, :meth:`sources` and then :meth:`send` are called on one thread.

    Attributes:
        together: whether a push only works if all of its receivers take part, as in a broadcast.
            They are then asked first. If one doesn't answer, there is no :meth:`send`; the others
            get sources anew, without it.
    """

    together: bool = False

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - optional
        """Take the arguments of the collector's ``init_updater``."""

    def attach(self, context: UpdaterContext) -> None:  # noqa: B027 - optional
        """Learn of the run; called once, before anything is sent."""

    def _get_server_weights(self) -> Any:
        """What is published by an update that was given no weights; None: the trainer's own.

        Where weights come from a server (a parameter server, a file), derive and return them: a
        module, a TensorDict or a state dict. They are loaded into the trainer's policy first.
        """
        return None

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:  # noqa: B027
        """Raise ArgumentError if weights on ``device`` can't be sent to these workers."""

    @abstractmethod
    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        """Prepare a push.

        Args:
            payload: uint8 ``[N]``, where the trainer has its weights. It doesn't change.
            peers: ``{worker_id: peer}`` of the receivers; a process that takes another's place has
                another peer.

        Returns:
            ``{worker_id: source}`` for each of them.
        """

    def send(self, payload: torch.Tensor) -> None:  # noqa: B027 - optional
        """Do the trainer's part while the receivers receive.

        Raises:
            RuntimeError: it broke off. Who has the payload is told by their acknowledgements.
        """

    def forget(self, peer: int) -> None:  # noqa: B027 - optional
        """A receiver is gone, or failed: whatever connects it with us may be in any state.

        May be called while :meth:`send` waits for it.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Give everything back, for good; a push may still be under way, and may fail then."""


def gpu_of(device: torch.device) -> str:
    """A name for the GPU behind ``device`` that is the same in all processes; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@dataclass(frozen=True)
class InlineSource(WeightSource):
    """The payload itself, which travels along."""

    payload: torch.Tensor

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        target.copy_(self.payload)


class RPCUpdater(WeightUpdaterBase):
    """Sends the weights to each receiver in an RPC of its own: simple, and slow for many."""

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        return dict.fromkeys(peers, InlineSource(payload.cpu()))


@dataclass(frozen=True)
class SharedMemorySource(WeightSource):
    """From memory of the trainer's that the receiver, on the same host, maps."""

    payload: SharedTensor

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        segment = self.payload.segment
        mapped: dict[Segment, torch.Tensor] = receiver_state.setdefault("segments", {})
        if segment not in mapped:
            mapped.clear()  # the trainer goes on to a new one when it needs a larger one
            mapped[segment] = segment.map()
        target.copy_(self.payload.within(mapped[segment]))


class SharedMemoryUpdater(WeightUpdaterBase):
    """Puts the weights where workers on the trainer's own host map them: one copy for each."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._segment: Segment | None = None
        self._closed = False
        self._lock = threading.Lock()  # a push may be under way when it is closed

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            if self._segment is None or len(self._memory) < len(payload):
                self._give_back()
                self._memory, self._segment = allocate(len(payload))
            place = SharedTensor(self._segment, 0, tuple(payload.shape), payload.dtype)
            memory = self._memory
        memory[: len(payload)].copy_(payload)
        return dict.fromkeys(peers, SharedMemorySource(place))

    def _give_back(self) -> None:
        if self._segment is not None:
            os.close(self._segment.fd)
            self._segment = None
            # It has a descriptor of its own.
            self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._give_back()
