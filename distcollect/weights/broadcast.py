"""Sends weights by broadcast, in process groups of exactly the trainer and the receivers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distcollect.errors import ArgumentError
from distcollect.net.interfaces import interface_of, listen
from distcollect.transport.worker_service import WeightSource
from distcollect.weights.gloo import gloo_group, missing_gloo_parts
from distcollect.weights.updaters import (
    RPCUpdater,
    SharedMemoryUpdater,
    SharedPayload,
    UpdaterContext,
    WeightUpdaterBase,
    gpu_of,
)

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# The trainer keeps the groups that were used most recently, and its workers the same ones.
_MAX_GROUPS = 32
# Between two looks at a broadcast: this share of the time that it has taken so far.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.0001, 0.02

log = logging.getLogger(__name__)


def choose_backend(wanted: str, gpus: Sequence[str]) -> str:
    """The backend for a group whose members have their weights on ``gpus``.

    NCCL needs a GPU of its own for each member; otherwise Gloo is used, through pinned memory.

    Raises:
        ArgumentError: NCCL is wanted and can't be used.
    """
    possible = dist.is_nccl_available() and all(gpus) and len(set(gpus)) == len(gpus)
    if wanted == "nccl" and not possible:
        raise ArgumentError(
            f"WeightSync(backend='nccl'): trainer and workers need a GPU each, but have "
            f"{[gpu or 'cpu' for gpu in gpus]} (trainer first); use backend='auto'"
        )
    return "nccl" if possible and wanted != "gloo" else "gloo"


class Groups:
    """The process groups that this process is in, by name, ordered by their last use."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Event] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all groups, the least recently used first."""
        with self._lock:
            return tuple(self._groups)

    def keep_only(self, names: Collection[str]) -> None:
        """Leave all other groups."""
        for name in self.names:
            if name not in names:
                self.drop(name)

    def join(self, place: BroadcastSource, store: Any, address: str) -> None:
        """Join a group if this process is not in it yet, without waiting for the other members."""
        with self._lock:
            group = self._groups.get(place.group)
        if group is None:
            prefixed = dist.PrefixStore(place.group, store)
            if place.on_gpu:
                name_interface(address)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = place.timeout  # noqa: SLF001 - there is no public way
                group = dist.ProcessGroupNCCL(prefixed, place.rank, place.size, options)
            else:
                group = gloo_group(prefixed, place.rank, place.size, address)
        with self._lock:
            self._groups[place.group] = group
            self._groups.move_to_end(place.group)

    def broadcast(self, place: BroadcastSource, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` from rank 0; all members of the group must do so together.

        Raises:
            RuntimeError: a member is gone or too late, or :meth:`drop` was called. The group is
                dropped then; ``flat`` may be torn, and may still be written to.
        """
        over = threading.Event()
        with self._lock:
            held = [self._groups.get(place.group)]
            self._under_way[place.group] = over
        try:
            _broadcast(held, place, flat, over)
        except RuntimeError:
            self.drop(place.group)
            # Gloo can't cancel a broadcast, and destroying the group waits for it to end.
            threading.Thread(target=_destroy, args=(held, place), daemon=True).start()
            raise
        finally:
            with self._lock:
                del self._under_way[place.group]

    def drop(self, name: str) -> None:
        """Leave a group; a broadcast of it that is under way here fails at once."""
        with self._lock:
            group = self._groups.pop(name, None)
            over = self._under_way.get(name)
        # A NCCL kernel waits forever for a dead peer.
        if group is not None and group.name() == "nccl":
            group.abort()
        if over is not None:
            over.set()

    def close(self) -> None:
        """Leave all groups."""
        self.keep_only(())


def _broadcast(
    held: list[Any], place: BroadcastSource, flat: torch.Tensor, over: threading.Event
) -> None:
    """Broadcast in the group in ``held``, and append the work to ``held``.

    Both are kept in no local variable, so that the traceback of an error doesn't keep them alive.
    """
    if held[0] is None:
        raise RuntimeError(f"process group {place.group} was left before its broadcast")
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = place.timeout
    held.append(held[0].broadcast([flat], options))
    if place.on_gpu:
        held[1].wait(place.timeout)
        torch.cuda.synchronize(flat.device)
        return
    if not _completes(held, over, place.timeout_s):
        raise RuntimeError(
            f"the broadcast in process group {place.group} was given up: a member is gone, or it "
            f"took longer than {place.timeout_s:g} s"
        )
    held[1].wait()


def _completes(held: list[Any], given_up: threading.Event, timeout_s: float) -> bool:
    """Wait up to ``timeout_s``, or until it is given up; whether the work in ``held`` has ended.

    It looks again and again, with pauses that grow with the time. Torch could also call a function
    here, or wait for the work itself. But if the work fails while the interpreter shuts down, then
    C++ code with an exception on its way can't take the interpreter's lock, and aborts the process.
    """
    begin = time.monotonic()
    while not held[1].is_completed():
        elapsed = time.monotonic() - begin
        pause_s = min(max(elapsed * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        if elapsed > timeout_s or given_up.wait(pause_s):
            return bool(held[1].is_completed())
    return True


def _destroy(held: list[Any], place: BroadcastSource) -> None:
    """Drop the references to group and work in ``held`` once the work has ended."""
    if len(held) > 1 and not place.on_gpu:
        _completes(held, threading.Event(), 2 * place.timeout_s)
    with contextlib.suppress(RuntimeError, IndexError):
        held[1].wait()
    held.clear()


def name_interface(address: str) -> None:
    """Have NCCL use the interface of ``address``; it takes that from the environment only.

    Does nothing if the user has named an interface. Nor for loopback: NCCL reads the variable once
    in a process, and later groups may need the network.
    """
    interface = interface_of(address)
    if interface not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


@dataclass(frozen=True)
class BroadcastSource(WeightSource):
    """The broadcast of a process group, which is made when its name comes up first.

    Attributes:
        group: its name.
        rank: the receiver's rank in it; the trainer's is 0.
        size: how many members it has.
        store: host and port of the store where its members find each other.
        timeout_s: for the broadcast.
        on_gpu: whether it uses NCCL; else Gloo.
        kept: the names of the groups that the trainer keeps; receivers leave all others.
    """

    group: str
    rank: int
    size: int
    store: tuple[str, int]
    timeout_s: float
    on_gpu: bool = False
    kept: tuple[str, ...] = ()

    @property
    def timeout(self) -> timedelta:
        """``timeout_s`` as torch takes it."""
        return timedelta(seconds=self.timeout_s)

    def join(self, receiver_state: dict[str, Any]) -> WeightSource | None:
        if "store" not in receiver_state:
            host, port = self.store
            receiver_state["store"] = dist.TCPStore(
                host, port, is_master=False, timeout=self.timeout
            )
            receiver_state["groups"] = Groups()
        receiver_state["groups"].keep_only(self.kept)
        receiver_state["groups"].join(self, receiver_state["store"], receiver_state["address"])
        return None

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        receiver_state["groups"].broadcast(self, target)


@dataclass(frozen=True)
class RelaySource(WeightSource):
    """A broadcast to a relay: it receives into memory that other receivers on its host map.

    Attributes:
        broadcast: where the relay receives.
        num_bytes: the payload's size.
    """

    broadcast: WeightSource
    num_bytes: int

    def join(self, receiver_state: dict[str, Any]) -> WeightSource:
        self.broadcast.join(receiver_state)
        shared: SharedPayload = receiver_state.setdefault("shared", SharedPayload())
        receiver_state["relayed"], place = shared.reserve(self.num_bytes)
        return place

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        memory = receiver_state["relayed"]
        try:
            self.broadcast.receive(memory, receiver_state)
        except RuntimeError:
            receiver_state["shared"].close()  # the broadcast may go on writing to it
            raise
        target.copy_(memory)


class BroadcastUpdater(WeightUpdaterBase):
    """One broadcast, in a process group of exactly the trainer and the receivers."""

    together = True

    def __init__(self, backend: str = "auto") -> None:
        """``backend``: "gloo"; "nccl"; or "auto", see :class:`~distcollect.WeightSync`."""
        self._backend = backend
        self._groups = Groups()
        self._names: dict[tuple[Any, ...], str] = {}
        self._left: deque[tuple[float, str, int]] = deque()  # (when it was left, name, size)
        self._counter = itertools.count()
        self._store: Any = None
        self._current: BroadcastSource | None = None
        self._staging: torch.Tensor | None = None

    def attach(self, context: UpdaterContext) -> None:
        self._context = context
        listener = listen(context.address)
        self._endpoint = (context.address, listener.getsockname()[1])
        # TCPStore would listen on every interface; it takes over a socket that is bound already.
        self._store = dist.TCPStore(
            *self._endpoint,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=context.timeout_s),
            master_listen_fd=listener.detach(),
        )

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:
        """Raise ArgumentError if NCCL is wanted, and not each process has a GPU of its own."""
        self._backend_for(device, worker_ids)

    def _backend_for(self, device: torch.device, worker_ids: Sequence[int]) -> str:
        gpus = [
            gpu_of(device),
            *(self._context.gpus.get(worker_id, "") for worker_id in worker_ids),
        ]
        return choose_backend(self._backend, gpus)

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, BroadcastSource]:
        on_gpu = self._backend_for(payload.device, list(peers)) == "nccl"
        members = (on_gpu, *peers.values())
        existing = self._groups.names
        self._groups.keep_only(existing[-_MAX_GROUPS + 1 :])
        existing = self._groups.names
        for left, name in [item for item in self._names.items() if item[1] not in existing]:
            del self._names[left]
            self._left.append((time.monotonic(), name, len(left)))
        self._clear_store()
        if members not in self._names:
            self._names[members] = f"weights{next(self._counter)}"
        name, size = self._names[members], len(peers) + 1
        kept = (*existing, name)
        first = BroadcastSource(
            name, 0, size, self._endpoint, self._context.timeout_s, on_gpu, kept
        )
        self._current = first
        self._groups.join(first, self._store, self._context.address)
        return {w: replace(first, rank=rank) for rank, w in enumerate(peers, start=1)}

    def _clear_store(self) -> None:
        """Delete the addresses that members of left groups had put there for each other."""
        # A member that is late may need them until then.
        deadline = time.monotonic() - self._context.timeout_s
        while self._left and self._left[0][0] < deadline:
            _, name, size = self._left.popleft()
            for rank in range(size):
                self._store.delete_key(f"{name}/0/{rank}")

    def send(self, payload: torch.Tensor) -> None:
        assert self._current is not None
        if payload.is_cuda and not self._current.on_gpu:
            if self._staging is None or len(self._staging) != len(payload):
                self._staging = torch.empty_like(payload, device="cpu", pin_memory=True)
            payload = self._staging.copy_(payload)
        self._groups.broadcast(self._current, payload)

    def forget(self, peer: int) -> None:
        """A receiver is gone, or failed: its groups can't be used any more."""
        for (_, *members), name in list(self._names.items()):
            if peer in members:
                self._groups.drop(name)

    def close(self) -> None:
        self._groups.close()
        self._store = None


class AutoUpdater(WeightUpdaterBase):
    """The default: workers on the trainer's host map its memory, the others get one broadcast.

    Of several workers on another host one is in the broadcast, and the others map its memory.
    Workers whose policy is on a GPU are all in the broadcast, on any host. If this torch lacks what
    a broadcast needs, each worker on another host gets the weights in a call of its own.
    """

    def __init__(self) -> None:
        self._near = SharedMemoryUpdater()
        missing = missing_gloo_parts()
        self._far: WeightUpdaterBase = RPCUpdater() if missing else BroadcastUpdater()
        if missing:
            log.warning(
                "torch %s lacks %s, so weights are not broadcast: each worker on another host gets "
                "them in a call of its own, which takes longer",
                *(torch.__version__, ", ".join(missing)),
            )

    def attach(self, context: UpdaterContext) -> None:
        self._context = context
        self._far.attach(context)

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        near = {w: peer for w, peer in peers.items() if self._is_near(payload, w, peer)}
        far = {w: peer for w, peer in peers.items() if w not in near}
        self.relays = self._relays(far)
        far = {w: peer for w, peer in far.items() if w not in self.relays}
        self.together = bool(far) and self._far.together
        sources = dict(self._near.sources(payload, near)) if near else {}
        if far:
            broadcasts = self._far.sources(payload, far)
            sources.update(broadcasts)
            for relay in {*self.relays.values()}:
                sources[relay] = RelaySource(broadcasts[relay], len(payload))
        return sources

    def _relays(self, peers: Mapping[int, int]) -> Mapping[int, int]:
        """The relay of each receiver that has one: the first receiver on its host."""
        first: dict[str, int] = {}
        relays: dict[int, int] = {}
        if not self._far.together:
            return relays
        for worker_id, peer in peers.items():
            host = None if self._context.gpus[worker_id] else self._context.host_of(peer)
            if host is not None and first.setdefault(host, worker_id) != worker_id:
                relays[worker_id] = first[host]
        return relays

    def _is_near(self, payload: torch.Tensor, worker_id: int, peer: int) -> bool:
        on_gpu = payload.is_cuda or self._context.gpus[worker_id]
        return not on_gpu and self._context.is_near(peer)

    def send(self, payload: torch.Tensor) -> None:
        if self.together:
            self._far.send(payload)

    def forget(self, peer: int) -> None:
        self._far.forget(peer)

    def close(self) -> None:
        self._near.close()
        self._far.close()


def default_updater(backend: str) -> WeightUpdaterBase:
    """The updater for ``backend``, see :class:`~distcollect.WeightSync`.

    Raises:
        ArgumentError: NCCL or Gloo is wanted, and this process can't use it.
    """
    lacks = "sees no GPU" if dist.is_nccl_available() else "has a torch without NCCL"
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.device_count()):
        raise ArgumentError(
            f"WeightSync(backend='nccl'): trainer and workers need a GPU each, but this process "
            f"{lacks}; use backend='auto'"
        )
    if backend == "gloo" and (missing := missing_gloo_parts()):
        raise ArgumentError(
            f"WeightSync(backend='gloo'): torch {torch.__version__} lacks {', '.join(missing)}; "
            "use backend='auto', or the torch version that constraints/tested.txt names"
        )
    return AutoUpdater() if backend == "auto" else BroadcastUpdater(backend)
