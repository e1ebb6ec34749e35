"""Sends weights by broadcast, in process groups of exactly the trainer and the receivers."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distcollect.errors import ArgumentError
from distcollect.net.interfaces import listen
from distcollect.transport.worker_service import WeightSource
from distcollect.weights.group_backends import GroupBackend, GroupMember, backend_named
from distcollect.weights.groups import Groups
from distcollect.weights.updaters import (
    RPCUpdater,
    SharedMemoryUpdater,
    SharedPayload,
    UpdaterContext,
    WeightUpdaterBase,
    gpu_of,
)

log = logging.getLogger(__name__)

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# The trainer keeps the groups that were used most recently, and its workers the same ones.
_MAX_GROUPS = 32
# What "auto" stands for, the best first.
_AUTO = ("nccl", "gloo")
# A backend that failed this often in a row at a site, in groups where it had never worked, is not
# used there any more if there is another one. A single failure may be due to a member that died
# meanwhile. A site is a GPU; without one, a process.
_MAX_FAILURES = 2


@dataclass(frozen=True)
class BroadcastSource(GroupMember, WeightSource):
    """The broadcast of a process group, which is made when its name comes up first.

    Attributes:
        store: host and port of the store where its members find each other.
        kept: the names of the groups that the trainer keeps; receivers leave all others.
    """

    store: tuple[str, int] = ("", 0)
    kept: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:  # type: ignore[override]
        """Return True if it writes to a GPU's memory directly."""
        return backend_named(self.backend).on_gpu

    def join(self, receiver_state: dict[str, Any]) -> WeightSource | None:
        if "store" not in receiver_state:
            receiver_state["store"] = self._connect()
            receiver_state["groups"] = Groups()
        groups: Groups = receiver_state["groups"]
        groups.keep_only(self.kept)
        store = receiver_state["store"]
        if self.group not in groups.names and backend_named(self.backend).needs_abort:
            # It may wait for another member by this connection, which then serves nothing else.
            store = self._connect()
        groups.join(self, store, receiver_state["address"])
        return None

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        receiver_state["groups"].broadcast(self, target)

    def _connect(self) -> Any:
        host, port = self.store
        return dist.TCPStore(host, port, is_master=False, timeout=self.timeout)


@dataclass(frozen=True)
class RelaySource(WeightSource):
    """A broadcast to a relay: other receivers on its host map memory in which it has the payload.

    Attributes:
        broadcast: where the relay receives.
        num_bytes: the payload's size.
    """

    broadcast: WeightSource
    num_bytes: int

    @property
    def on_gpu(self) -> bool:  # type: ignore[override]
        """Return True if the broadcast writes to a GPU's memory directly."""
        return self.broadcast.on_gpu

    def join(self, receiver_state: dict[str, Any]) -> WeightSource:
        self.broadcast.join(receiver_state)
        shared: SharedPayload = receiver_state.setdefault("shared", SharedPayload())
        receiver_state["relayed"], place = shared.reserve(self.num_bytes)
        return place

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        memory = receiver_state["relayed"]
        if self.on_gpu:
            self.broadcast.receive(target, receiver_state)
            memory.copy_(target)
            return
        try:
            self.broadcast.receive(memory, receiver_state)
        except RuntimeError:
            receiver_state["shared"].close()  # the broadcast may go on writing to it
            raise
        target.copy_(memory)


class BroadcastUpdater(WeightUpdaterBase):
    """One broadcast, in a process group of exactly the trainer and the receivers."""

    together = True

    def __init__(self, backend: str | Sequence[str] = "auto") -> None:
        """Broadcast by ``backend``.

        Args:
            backend: "gloo", "nccl", the name of a registered backend, or "auto", see
                :class:`~distcollect.WeightSync`. Or several names: the first one that can be used
                is used. "auto" is "nccl", then "gloo".
        """
        names = _AUTO if backend == "auto" else (backend,) if isinstance(backend, str) else backend
        self._backends = [backend_named(name) for name in names]
        self._groups = Groups()
        self._names: dict[tuple[Any, ...], str] = {}
        self._left: deque[tuple[float, GroupMember]] = deque()  # when it was left, first member
        self._counter = itertools.count()
        self._store: Any = None
        self._current: BroadcastSource | None = None
        self._sites: tuple[str | int, ...] = ()  # that the current one goes to
        self._staging: torch.Tensor | None = None
        self._worked: set[str] = set()  # groups that have completed a broadcast
        self._failures: Counter[tuple[str, str | int]] = Counter()  # in a row, of (backend, site)
        self._told: set[str] = set()  # what the user was told

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
        """Raise ArgumentError if no backend can be used, as for NCCL where a GPU is missing."""
        self._choose(device, dict.fromkeys(worker_ids))

    def is_on_gpus(self, device: torch.device, peers: Mapping[int, int]) -> bool:
        """Return True if weights on ``device`` go to these workers directly from GPU to GPU."""
        return self._choose(device, peers, tells=False).on_gpu

    def _choose(
        self, device: torch.device, peers: Mapping[int, int | None], *, tells: bool = True
    ) -> GroupBackend:
        """The first backend that can be used between the trainer and these workers.

        ``tells``: log why it is not a better one.

        Raises:
            ArgumentError: there is none.
        """
        gpus = [gpu_of(device), *(self._context.gpus.get(worker_id, "") for worker_id in peers)]
        refusals: list[str] = []
        for backend in self._backends:
            reason = backend.refusal(gpus)
            if not reason and backend is not self._backends[-1]:
                reason = self._failed(backend, peers)
            if not reason:
                if any(gpus) and tells:
                    self._tell(backend, refusals)
                return backend
            refusals.append(f"WeightSync(backend={backend.name!r}): {reason}")
        raise ArgumentError(f"{'; '.join(refusals)}; use backend='auto'")

    def _failed(self, backend: GroupBackend, peers: Mapping[int, int | None]) -> str:
        failed = [
            worker_id
            for worker_id, peer in peers.items()
            if peer is not None
            and self._failures[backend.name, self._site(worker_id, peer)] >= _MAX_FAILURES
        ]
        return f"it failed {_MAX_FAILURES} times with workers {failed}" if failed else ""

    def _site(self, worker_id: int, peer: int) -> str | int:
        return self._context.gpus.get(worker_id) or peer

    def _tell(self, backend: GroupBackend, refusals: Sequence[str]) -> None:
        """Log once why it is not a better one."""
        message = "; ".join(refusals)
        if message and message not in self._told:
            self._told.add(message)
            log.info("weights are broadcast by %s: %s", backend.name, message)

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, BroadcastSource]:
        backend = self._choose(payload.device, peers)
        members = (backend.name, *peers.values())
        self._groups.keep_only(self._groups.names[-_MAX_GROUPS + 1 :])
        existing = self._groups.names
        for left, name in [item for item in self._names.items() if item[1] not in existing]:
            del self._names[left]
            self._worked.discard(name)
            member = GroupMember(name, 0, len(left), self._context.timeout_s, left[0])
            self._left.append((time.monotonic(), member))
        self._clear_store()
        if members not in self._names:
            self._names[members] = f"weights{next(self._counter)}"
        name = self._names[members]
        first = BroadcastSource(
            group=name,
            rank=0,
            size=len(members),
            timeout_s=self._context.timeout_s,
            backend=backend.name,
            store=self._endpoint,
            kept=(*existing, name),
        )
        self._current = first
        self._sites = tuple(self._site(worker_id, peer) for worker_id, peer in peers.items())
        self._groups.join(first, self._store, self._context.address)
        return {w: replace(first, rank=rank) for rank, w in enumerate(peers, start=1)}

    def _clear_store(self) -> None:
        """Delete what members of left groups had put there for each other."""
        # A member that is late may need it until then.
        deadline = time.monotonic() - self._context.timeout_s
        while self._left and self._left[0][0] < deadline:
            _, member = self._left.popleft()
            for key in backend_named(member.backend).keys(member):
                self._store.delete_key(f"{member.group}/{key}")

    def send(self, payload: torch.Tensor) -> None:
        assert self._current is not None
        if payload.is_cuda and not self._current.on_gpu:
            if self._staging is None or len(self._staging) != len(payload):
                self._staging = torch.empty_like(payload, device="cpu", pin_memory=True)
            payload = self._staging.copy_(payload)
        try:
            self._groups.broadcast(self._current, payload)
        except RuntimeError as error:
            self._staging = None  # the broadcast may go on reading it
            self._note_failure(self._current, error)
            raise
        self._worked.add(self._current.group)
        for site in self._sites:
            del self._failures[self._current.backend, site]

    def _note_failure(self, member: GroupMember, error: RuntimeError) -> None:
        """If it keeps failing where it never worked, the next backend takes its place."""
        if member.group in self._worked or member.backend == self._backends[-1].name:
            return
        self._failures.update((member.backend, site) for site in self._sites)
        if any(self._failures[member.backend, site] >= _MAX_FAILURES for site in self._sites):
            log.warning(
                "weights are not broadcast by %s any more where it failed %d times: %s",
                member.backend,
                _MAX_FAILURES,
                error,
            )

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

    Of several workers on another host one is in the broadcast, and the others map its memory. Where
    trainer and workers have GPUs, and NCCL can be used, the same holds for GPUs instead of hosts:
    one worker of each GPU but the trainer's is in the broadcast. If this torch lacks what a
    broadcast needs, each worker on another host gets the weights in a call of its own.
    """

    def __init__(self) -> None:
        self._near = SharedMemoryUpdater()
        reason = backend_named("gloo").refusal(())
        self._broadcast = None if reason else BroadcastUpdater()
        self._far: WeightUpdaterBase = self._broadcast or RPCUpdater()
        if reason:
            log.warning(
                "%s, so weights are not broadcast: each worker on another host gets them in a call "
                "of its own, which takes longer",
                reason,
            )

    def attach(self, context: UpdaterContext) -> None:
        self._context = context
        self._far.attach(context)

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        near, self.relays = self._plan(payload.device, peers)
        far = {w: p for w, p in peers.items() if w not in near and w not in self.relays}
        self.together = bool(far) and self._far.together
        sources = dict(self._near.sources(payload, near)) if near else {}
        if far:
            broadcasts = self._far.sources(payload, far)
            sources.update(broadcasts)
            for relay in {*self.relays.values()}:
                sources[relay] = RelaySource(broadcasts[relay], len(payload))
        return sources

    def _plan(
        self, device: torch.device, peers: Mapping[int, int]
    ) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Who maps the trainer's memory, ``{worker_id: peer}``, and who has which relay."""
        shares_memory, gpus = self._context.shares_memory, self._context.gpus
        if own := gpu_of(device):
            near = {w: peer for w, peer in peers.items() if gpus[w] == own and shares_memory(peer)}
            relays = self._relays(near, peers, of_gpus=True)
            first = {w: p for w, p in peers.items() if w not in near and w not in relays}
            if first and self._broadcast and self._broadcast.is_on_gpus(device, first):
                return near, relays
        near = {w: peer for w, peer in peers.items() if shares_memory(peer)}
        return near, self._relays(near, peers, of_gpus=False)

    def _relays(
        self, near: Mapping[int, int], peers: Mapping[int, int], *, of_gpus: bool
    ) -> Mapping[int, int]:
        """The relay of each receiver that has one: the first on its host, or there on its GPU."""
        first: dict[tuple[str, str], int] = {}
        relays: dict[int, int] = {}
        if self._broadcast is None:
            return relays
        for worker_id, peer in peers.items():
            host = self._context.host_key(peer)
            if worker_id in near or host is None:
                continue
            site = host, self._context.gpus[worker_id] if of_gpus else ""
            if first.setdefault(site, worker_id) != worker_id:
                relays[worker_id] = first[site]
        return relays

    def send(self, payload: torch.Tensor) -> None:
        if self.together:
            self._far.send(payload)

    def forget(self, peer: int) -> None:
        self._far.forget(peer)

    def close(self) -> None:
        self._near.close()
        self._far.close()


class NoUpdater(AutoUpdater):
    """Sends nothing: the workers keep the weights that they started with."""

    def _skip_update(self, worker_id: int) -> bool:
        return True


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
    if backend == "gloo" and (reason := backend_named("gloo").refusal(())):
        raise ArgumentError(
            f"WeightSync(backend='gloo'): {reason}; use backend='auto', or the torch version that "
            "constraints/tested.txt names"
        )
    return AutoUpdater() if backend == "auto" else BroadcastUpdater(backend)
