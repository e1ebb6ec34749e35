"""Ways for new weights to get from the trainer to its workers.

The sender (:mod:`.weights`) decides who gets which version and when; an updater moves the bytes.
On the trainer it says for each receiver where that finds them, its :class:`Source`, which travels
there and writes them into memory that the receiver has ready.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from .errors import ArgumentError
from .shared import Segment, SharedTensor, allocate
from .topology import listen

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Groups that the trainer keeps for reuse, the most recently used; its workers keep the same.
_MAX_GROUPS = 32
# Gloo waits five times as long for a member's connection. All have joined by then, and who waits
# for one that has died since is told so; this is for when even that doesn't get through.
_CONNECT_TIMEOUT_S = 2.0


class Source(ABC):
    """Where a receiver finds a payload. It is pickled to get there."""

    on_gpu: bool = False  # whether it writes to a GPU's memory directly

    def join(self, keep: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Meet the other receivers, without waiting for any; only where these receive together.

        Called before :meth:`receive`, and before the sender begins to send.

        Args:
            keep: see :meth:`receive`.
        """

    @abstractmethod
    def receive(self, target: torch.Tensor, keep: dict[str, Any]) -> None:
        """Write the payload into ``target``.

        Args:
            target: uint8 ``[payload's size]``.
            keep: for what is to be there for the next push too. It is this receiver's own and lives
                as long. What has a ``close`` method is closed in the end; also from another thread
                when the sender gives a push up, so that this method ends, and may be used again.

        Raises:
            RuntimeError, OSError: it can't be had; ``target`` may be half written then, and isn't
                used again.
        """


@dataclass(frozen=True)
class Site:
    """What an updater has to know of the run.

    Attributes:
        address: of the trainer's host, on the interface by which workers reach it.
        timeout_s: for each wait.
        gpus: worker_id to a name of the GPU that has its policy, "" for the CPU.
    """

    address: str
    timeout_s: float
    gpus: Mapping[int, str]


class WeightUpdaterBase(ABC):
    """Moves weights from the trainer to workers; derive from it to do that in another way.

    :meth:`sources` and :meth:`send` are called on one thread, one after the other.

    Attributes:
        together: nobody gets the payload unless all of its receivers take part, as in a broadcast.
            They are asked first, and without an answer there is no :meth:`send`: those who did
            answer get sources of their own.
    """

    together: bool = False

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - optional
        """Take the arguments of the collector's ``init_updater``."""

    def attach(self, site: Site) -> None:  # noqa: B027 - optional
        """Learn of the run; called once, before anything is sent."""

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:  # noqa: B027
        """Raise ArgumentError if weights on ``device`` can't be sent to these workers."""

    @abstractmethod
    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Source]:
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
        """Give everything back; a :meth:`send` may still be under way."""


def gpu_of(device: torch.device) -> str:
    """A name for the GPU behind ``device`` that is the same in all processes; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def choose_backend(wanted: str, gpus: Sequence[str]) -> str:
    """The backend for a group whose members have their weights on ``gpus``.

    NCCL needs a GPU of its own for each member; where it can't be, Gloo goes through pinned memory.

    Raises:
        ArgumentError: NCCL is wanted and can't be.
    """
    possible = dist.is_nccl_available() and all(gpus) and len(set(gpus)) == len(gpus)
    if wanted == "nccl" and not possible:
        raise ArgumentError(
            f"WeightSync(backend='nccl'): trainer and workers need a GPU each, but have {gpus} "
            "(trainer first, '' is the CPU); use backend='auto'"
        )
    return "nccl" if possible and wanted != "gloo" else "gloo"


class Groups:
    """Process groups by name, the least recently used dropped first."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Event] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of all there are."""
        with self._lock:
            return tuple(self._groups)

    def keep_only(self, names: Collection[str]) -> None:
        """Leave all others."""
        for name in self.names:
            if name not in names:
                self.drop(name)

    def join(self, place: FromGroup, store: Any, address: str) -> None:
        """Be in a group, without waiting for its other members."""
        with self._lock:
            group = self._groups.get(place.group)
        if group is None:
            prefixed = dist.PrefixStore(place.group, store)
            if place.on_gpu:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = place.timeout  # noqa: SLF001 - there is no public way
                group = dist.ProcessGroupNCCL(prefixed, place.rank, place.size, options)
            else:
                group = _gloo(prefixed, place, address)
        with self._lock:
            self._groups[place.group] = group
            self._groups.move_to_end(place.group)

    def broadcast(self, place: FromGroup, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` from rank 0; all members of the group must do so together.

        Raises:
            RuntimeError: a member is gone or too late, or the group was dropped meanwhile. It is
                dropped then, ``flat`` may be torn, and may still be written to.
        """
        over = threading.Event()
        with self._lock:
            held = [self._groups.get(place.group)]
            self._under_way[place.group] = over
        try:
            _broadcast(held, place, flat, over)
        except RuntimeError:
            self.drop(place.group)
            # Gloo can't end what is under way, and giving the group back waits for that.
            threading.Thread(target=_outlast, args=(held,), daemon=True).start()
            raise
        finally:
            with self._lock:
                del self._under_way[place.group]

    def drop(self, name: str) -> None:
        """Leave a group; who waits in its broadcast is told at once."""
        with self._lock:
            group = self._groups.pop(name, None)
            over = self._under_way.get(name)
        # A NCCL kernel that waits for a dead peer would wait for ever.
        if group is not None and group.name() == "nccl":
            group.abort()
        if over is not None:
            over.set()

    def close(self) -> None:
        """Leave all."""
        self.keep_only(())


def _broadcast(
    held: list[Any], place: FromGroup, flat: torch.Tensor, over: threading.Event
) -> None:
    """Broadcast in the group in ``held``, and put the work there too.

    They are in no variable, so that an error's traceback doesn't keep them.
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
    done = held[1].get_future()
    done.add_done_callback(lambda _: over.set())
    over.wait(place.timeout_s)
    if not done.done():
        raise RuntimeError(
            f"the broadcast in process group {place.group} was given up: a member is gone, or it "
            f"took longer than {place.timeout_s:g} s"
        )
    held[1].wait()


def _outlast(held: list[Any]) -> None:
    with contextlib.suppress(RuntimeError, IndexError):
        held[1].wait()
    held.clear()


def _gloo(store: Any, place: FromGroup, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no public way
    # The address names the interface, and connections are made on first use: a broadcast needs a
    # tree of them, not all pairs. So nobody is waited for here.
    options._devices = [  # noqa: SLF001
        dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    ]
    options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)  # noqa: SLF001
    return dist.ProcessGroupGloo(store, place.rank, place.size, options)


@dataclass(frozen=True)
class FromGroup(Source):
    """From a process group's broadcast; the first mention of a group under a name makes the group.

    Attributes:
        group: its name.
        rank: the receiver's; the trainer is 0.
        size: how many are in it.
        store: host and port of the store where its members find each other.
        timeout_s: for the broadcast.
        on_gpu: whether it is one of NCCL's, else Gloo's.
        kept: the names of the groups that the trainer has; all others are left.
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

    def join(self, keep: dict[str, Any]) -> None:
        """See :class:`Source`."""
        if "store" not in keep:
            host, port = self.store
            keep["store"] = dist.TCPStore(host, port, is_master=False, timeout=self.timeout)
            keep["groups"] = Groups()
        keep["groups"].keep_only(self.kept)
        keep["groups"].join(self, keep["store"], keep["address"])

    def receive(self, target: torch.Tensor, keep: dict[str, Any]) -> None:
        """See :class:`Source`."""
        keep["groups"].broadcast(self, target)


class BroadcastUpdater(WeightUpdaterBase):
    """One broadcast to a process group of exactly the receivers: the default."""

    together = True

    def __init__(self, backend: str = "auto") -> None:
        """``backend``: "gloo"; "nccl"; or "auto", see :class:`~distcollect.WeightSync`."""
        self._backend = backend
        self._groups = Groups()
        self._names: dict[tuple[Any, ...], str] = {}
        self._left: deque[tuple[float, str, int]] = deque()  # since when, name, size
        self._counter = itertools.count()
        self._store: Any = None
        self._current: FromGroup | None = None
        self._staging: torch.Tensor | None = None

    def attach(self, site: Site) -> None:
        """See :class:`WeightUpdaterBase`."""
        self._site = site
        listener = listen(site.address)
        self._endpoint = (site.address, listener.getsockname()[1])
        # TCPStore would listen on every interface; it takes over a socket that is bound already.
        self._store = dist.TCPStore(
            *self._endpoint,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=site.timeout_s),
            master_listen_fd=listener.detach(),
        )

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:
        """See :class:`WeightUpdaterBase`: NCCL may be impossible."""
        self._backend_for(device, worker_ids)

    def _backend_for(self, device: torch.device, worker_ids: Sequence[int]) -> str:
        gpus = [gpu_of(device), *(self._site.gpus[worker_id] for worker_id in worker_ids)]
        return choose_backend(self._backend, gpus)

    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Source]:
        """See :class:`WeightUpdaterBase`."""
        on_gpu = self._backend_for(payload.device, list(peers)) == "nccl"
        members = (on_gpu, *peers.values())
        existing = self._groups.names
        self._groups.keep_only(existing[-_MAX_GROUPS + 1 :])
        existing = self._groups.names
        for gone, name in [item for item in self._names.items() if item[1] not in existing]:
            del self._names[gone]
            self._left.append((time.monotonic(), name, len(gone)))
        self._clear_store()
        if members not in self._names:
            self._names[members] = f"weights{next(self._counter)}"
        name, size = self._names[members], len(peers) + 1
        kept = (*existing, name)
        first = FromGroup(name, 0, size, self._endpoint, self._site.timeout_s, on_gpu, kept)
        self._current = first
        self._groups.join(first, self._store, self._site.address)
        return {w: replace(first, rank=rank) for rank, w in enumerate(peers, start=1)}

    def _clear_store(self) -> None:
        """Delete what members of groups that were left had put there for each other."""
        # For so long, one that is late may look for another.
        deadline = time.monotonic() - self._site.timeout_s
        while self._left and self._left[0][0] < deadline:
            _, name, size = self._left.popleft()
            for rank in range(size):
                self._store.delete_key(f"{name}/0/{rank}")

    def send(self, payload: torch.Tensor) -> None:
        """See :class:`WeightUpdaterBase`."""
        assert self._current is not None
        if payload.is_cuda and not self._current.on_gpu:
            if self._staging is None or len(self._staging) != len(payload):
                self._staging = torch.empty_like(payload, device="cpu", pin_memory=True)
            payload = self._staging.copy_(payload)
        self._groups.broadcast(self._current, payload)

    def forget(self, peer: int) -> None:
        """See :class:`WeightUpdaterBase`: its groups are of no use any more."""
        for (_, *members), name in list(self._names.items()):
            if peer in members:
                self._groups.drop(name)

    def close(self) -> None:
        """See :class:`WeightUpdaterBase`."""
        self._groups.close()
        self._store = None


@dataclass(frozen=True)
class Carried(Source):
    """The payload itself, which travels along."""

    payload: torch.Tensor

    def receive(self, target: torch.Tensor, keep: dict[str, Any]) -> None:
        """See :class:`Source`."""
        target.copy_(self.payload)


class RPCUpdater(WeightUpdaterBase):
    """Sends the weights to each receiver in an RPC of its own: simple, and slow for many."""

    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Source]:
        """See :class:`WeightUpdaterBase`."""
        return dict.fromkeys(peers, Carried(payload.cpu()))


@dataclass(frozen=True)
class FromMemory(Source):
    """From memory of the trainer's that the receiver, on the same host, maps."""

    payload: SharedTensor

    def receive(self, target: torch.Tensor, keep: dict[str, Any]) -> None:
        """See :class:`Source`."""
        segment = self.payload.segment
        mapped: dict[Segment, torch.Tensor] = keep.setdefault("segments", {})
        if segment not in mapped:
            mapped.clear()  # the trainer goes on to a new one when it needs a larger one
            mapped[segment] = segment.map()
        target.copy_(self.payload.within(mapped[segment]))


class SharedMemoryUpdater(WeightUpdaterBase):
    """Puts the weights where workers on the trainer's own host map them: one copy for each."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._segment: Segment | None = None

    def sources(self, payload: torch.Tensor, peers: Mapping[int, int]) -> Mapping[int, Source]:
        """See :class:`WeightUpdaterBase`."""
        if self._segment is None or len(self._memory) < len(payload):
            self.close()
            self._memory, self._segment = allocate(len(payload))
        self._memory[: len(payload)].copy_(payload)
        place = SharedTensor(self._segment, 0, tuple(payload.shape), payload.dtype)
        return dict.fromkeys(peers, FromMemory(place))

    def close(self) -> None:
        """See :class:`WeightUpdaterBase`."""
        if self._segment is not None:
            os.close(self._segment.fd)
            self._segment = None
