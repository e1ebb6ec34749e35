"""Ways for new weights to get from the trainer to its workers.

The sender (:mod:`.sender`) decides which workers get which version, and when; an updater moves the
bytes. On the trainer it names a :class:`WeightSource` for each receiver. That travels to the
receiver and writes the bytes into memory that the receiver has ready.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from distcollect.common.memory_segment import Segment
from distcollect.common.shared_memory import SharedTensor, allocate, map_segment
from distcollect.transport.worker_service import WeightSource


@dataclass(frozen=True)
class UpdaterContext:
    """All that an updater needs to know of the run.

    Attributes:
        address: of the trainer's host, on the interface by which workers reach it.
        timeout_s: for each wait.
        gpus: worker_id to a name of the GPU that has its policy, "" for the CPU.
        shares_memory: whether a peer is on the trainer's host, and can map its memory.
        host_key: equal for peers that can map each other's memory; None: it shares none.
        calls_suffice: weights in a call are as fast as a broadcast.
    """

    address: str
    timeout_s: float
    gpus: Mapping[int, str]
    shares_memory: Callable[[int], bool] = lambda _: False
    host_key: Callable[[int], str | None] = lambda _: None
    calls_suffice: bool = False


class WeightUpdaterBase:
    """Moves weights from the trainer to workers; derive from it for a way of your own.

    For each push, :meth:`sources` and then :meth:`send` are called on one thread. A class without
    :meth:`sources`, such as one for TorchRL's collectors, says only what is sent, and to which
    workers. The methods for that have the names that TorchRL gives them; they are called on the
    thread that calls ``update_policy_weights_``.

    Attributes:
        together: whether a push only works if all of its receivers take part, as in a broadcast.
            Then each is asked first whether it is ready. If one doesn't answer, :meth:`send` is not
            called; :meth:`sources` is called again for the others.
        relays: of the push for which :meth:`sources` was called last, maps the worker_id of each
            receiver that gets the payload from another one, its relay, to that one's worker_id.
            The relay's source says where, see :meth:`WeightSource.receive`.
        exposure: what listens for it, who may connect, and what is encrypted; "": nothing does.
    """

    exposure: str = ""
    together: bool = False
    relays: Mapping[int, int] = MappingProxyType({})

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of the collector's ``init_updater``."""

    def attach(self, context: UpdaterContext) -> None:
        """Take what is known of the run; called once, before anything is sent."""

    def _get_server_weights(self) -> Any:
        """The weights of an update that was given none; None: those of the trainer's policy.

        If weights come from a server (a parameter server, a file), override this to return them: a
        module, a TensorDict or a state dict. They are loaded into the trainer's policy first.
        """
        return None

    def _maybe_map_weights(self, weights: Any) -> Any:
        """Change the weights that are to be published: a module, a TensorDict or a state dict.

        What the user gave, or :meth:`_get_server_weights`, or else the trainer's policy; returns
        one of these kinds. By default they stay as they are.
        """
        return weights

    def _skip_update(self, worker_id: int) -> bool:
        """Return True if a worker is left out of an update that would have gone to it."""
        return False

    def all_worker_ids(self) -> Sequence[int] | Sequence[torch.device] | None:
        """The workers of an update for which the user selected none; None: all."""
        return None

    def _call_post_hooks(self) -> None:
        """Called after each update, when the weights are on their way to the workers."""

    _collector: Callable[[], Any] = staticmethod(lambda: None)

    def register_collector(self, collector: Any) -> None:
        """Take the collector that uses this updater; called once, before the first update."""
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector that uses this updater; None before there is one, and when it is gone."""
        return self._collector()

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:
        """Raise ArgumentError if weights on ``device`` can't be sent to these workers."""

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        """Prepare a push. If a class doesn't override it, the default updater moves its weights.

        Args:
            payload: uint8 ``[N]``, on the device of the trainer's weights. It doesn't change.
            peers: ``{worker_id: peer}`` of the receivers; each process has another peer.

        Returns:
            ``{worker_id: source}`` for each of them that is not in ``relays``.
        """
        raise NotImplementedError

    def send(self, payload: torch.Tensor) -> None:
        """Do the trainer's part while the receivers receive.

        Raises:
            RuntimeError: it broke off. The acknowledgements show which receivers have the payload.
        """

    def forget(self, peer: int) -> None:
        """A receiver is gone, or failed: drop connections with it, as they may be in any state.

        May be called while :meth:`send` waits for the receiver.
        """

    def close(self) -> None:
        """Give all resources back. A push may still be under way; it may fail then."""


def gpu_of(device: torch.device) -> str:
    """A name for the GPU behind ``device`` that is the same in all processes; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@dataclass(frozen=True)
class InlineSource(WeightSource):
    """The payload itself: it travels with the source."""

    payload: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _ArrivedSource, (self.payload,)

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        target.copy_(self.payload)


class _ArrivedSource(InlineSource):
    """The same in the process to which it was sent."""

    @property
    def arrived(self) -> torch.Tensor:  # type: ignore[override]
        """Return the payload."""
        return self.payload


@dataclass(frozen=True)
class SharedMemorySource(WeightSource):
    """Memory of the trainer, which the receiver maps; both are on one host."""

    payload: SharedTensor

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        segment = self.payload.segment
        mapped: dict[Segment, torch.Tensor] = receiver_state.setdefault("segments", {})
        if segment not in mapped:
            mapped.clear()  # the trainer uses one segment, until it needs a larger one
            mapped[segment] = map_segment(segment)
        target.copy_(self.payload.within(mapped[segment]))


class SharedPayload:
    """Memory for payloads that other processes on this host map; larger if one needs more."""

    def __init__(self) -> None:
        self._whole: tuple[torch.Tensor, Segment] | None = None

    def reserve(self, num_bytes: int) -> tuple[torch.Tensor, SharedMemorySource]:
        """Memory for a payload, uint8 ``[num_bytes]``, and where the others find it."""
        whole = self._whole  # close() may be called meanwhile
        if whole is None or len(whole[0]) < num_bytes:
            whole = self._whole = allocate(num_bytes)
        memory, segment = whole
        place = SharedTensor(segment, 0, (num_bytes,), torch.uint8)
        return memory[:num_bytes], SharedMemorySource(place)

    def close(self) -> None:
        """Give the memory back; who has mapped it keeps it."""
        self._whole = None


class SharedMemoryUpdater(WeightUpdaterBase):
    """Puts the weights into memory that workers on the trainer's host map: one copy for each."""

    def __init__(self) -> None:
        self._shared = SharedPayload()
        self._closed = False

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        memory, place = self._shared.reserve(len(payload))
        if self._closed:
            self._shared.close()
            raise RuntimeError("the updater was closed")
        memory.numpy()[:] = payload.numpy(force=True)  # on one core: see tensor_cache.copy_of
        return dict.fromkeys(peers, place)

    def close(self) -> None:
        self._closed = True
        self._shared.close()


@dataclass(frozen=True)
class RelaySource(WeightSource):
    """A relay's source: others on its host map memory in which it has the payload.

    Attributes:
        own: where the relay receives.
    """

    own: WeightSource

    @property
    def on_gpu(self) -> bool:  # type: ignore[override]
        """Return True if its own source writes to a GPU's memory directly."""
        return self.own.on_gpu

    @property
    def arrived(self) -> torch.Tensor | None:  # type: ignore[override]
        """Return the payload if it has come along."""
        return self.own.arrived

    def join(self, receiver_state: dict[str, Any]) -> None:
        self.own.join(receiver_state)

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> WeightSource:
        self.own.receive(target, receiver_state)
        shared: SharedPayload = receiver_state.setdefault("shared", SharedPayload())
        memory, place = shared.reserve(len(target))
        memory.copy_(target)
        return place


class TransportUpdater(WeightUpdaterBase):
    """Sends weights by the transport that the run uses, once to each host.

    Workers on the trainer's host map its memory. Of several workers on another host one gets the
    weights, and the others map its memory.
    """

    def __init__(self) -> None:
        self._near = SharedMemoryUpdater()

    def attach(self, context: UpdaterContext) -> None:
        self._context = context

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        self.together = False  # unless _far_sources() says so
        near, far, self.relays = self._plan(payload.device, peers)
        sources = dict(self._near.sources(payload, near)) if near else {}
        if far:
            sources.update(self._far_sources(payload, far))
            for relay in {*self.relays.values()}:
                sources[relay] = RelaySource(sources[relay])
        return sources

    def _far_sources(
        self, payload: torch.Tensor, far: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        """Return the sources of those that can't map the trainer's memory and have no relay."""
        return dict.fromkeys(far, InlineSource(payload.cpu()))

    def _is_on_gpus(self, device: torch.device, peers: Mapping[int, int]) -> bool:
        """Return True if weights on ``device`` go to these workers directly from GPU to GPU."""
        return False

    def _plan(
        self, device: torch.device, peers: Mapping[int, int]
    ) -> tuple[Mapping[int, int], Mapping[int, int], Mapping[int, int]]:
        """Sort the receivers.

        Returns:
            Who maps the trainer's memory, and who is sent the payload, both as ``{worker_id:
            peer}``; and the relay of each other one: the first on its host, or there on its GPU.
        """
        gpus, own = self._context.gpus, gpu_of(device)
        for of_gpus in (True, False) if own else (False,):
            near: dict[int, int] = {}
            far: dict[int, int] = {}
            relays: dict[int, int] = {}
            first: dict[tuple[str, str], int] = {}
            for worker_id, peer in peers.items():
                gpu = gpus[worker_id] if of_gpus else ""
                host = self._context.host_key(peer)
                if self._context.shares_memory(peer) and (not of_gpus or gpu == own):
                    near[worker_id] = peer
                elif host is None or first.setdefault((host, gpu), worker_id) == worker_id:
                    far[worker_id] = peer
                else:
                    relays[worker_id] = first[host, gpu]
            if of_gpus and far and self._is_on_gpus(device, far):
                break
        return near, far, relays

    def close(self) -> None:
        self._near.close()
