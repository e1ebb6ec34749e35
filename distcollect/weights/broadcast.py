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
from distcollect.weights.process_groups import GroupBackend, GroupMember, Groups, backend_named
from distcollect.weights.updaters import (
    TransportUpdater,
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
# A backend that failed this often with a process, with which it had never worked, is not used there
# any more if there is another one. A single failure may be due to a member that died meanwhile.
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

    def join(self, receiver_state: dict[str, Any]) -> None:
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

    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> None:
        receiver_state["groups"].broadcast(self, target)

    def _connect(self) -> Any:
        host, port = self.store
        return dist.TCPStore(host, port, is_master=False, timeout=self.timeout)


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
        # The groups that were joined, by backend and peers.
        self._joined: dict[tuple[Any, ...], BroadcastSource] = {}
        self._left: deque[tuple[float, BroadcastSource]] = deque()  # since when, our membership
        self._counter = itertools.count()
        self._store: Any = None
        self._current: tuple[Any, ...] = ()  # the backend and the peers of the last push
        self._worked: set[tuple[str, int]] = set()  # with which peers each backend has worked
        self._failures: Counter[tuple[str, int]] = Counter()  # with others
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
        self.exposure = (
            "broadcasts of weights: torch's store listens at {}:{}, and Gloo or NCCL at ports of "
            "each host; whoever reaches one may connect; nothing is encrypted"
        ).format(*self._endpoint)
        log.info("%s", self.exposure)

    def check(self, device: torch.device, worker_ids: Sequence[int]) -> None:
        """Raise ArgumentError if no backend can be used, as for NCCL where a GPU is missing."""
        self._choose(device, dict.fromkeys(worker_ids, -1))

    def is_on_gpus(self, device: torch.device, peers: Mapping[int, int]) -> bool:
        """Return True if weights on ``device`` go to these workers directly from GPU to GPU."""
        return self._choose(device, peers)[0].on_gpu

    def _choose(self, device: torch.device, peers: Mapping[int, int]) -> tuple[GroupBackend, str]:
        """Return the first backend that can be used with these workers, and why it is no better.

        Raises:
            ArgumentError: there is none.
        """
        gpus = [gpu_of(device), *(self._context.gpus.get(worker_id, "") for worker_id in peers)]
        refusals: list[str] = []
        for backend in self._backends:
            failed = [
                w for w, p in peers.items() if self._failures[backend.name, p] >= _MAX_FAILURES
            ]
            reason = backend.refusal(gpus)
            if failed and not reason and backend is not self._backends[-1]:
                reason = f"it failed {_MAX_FAILURES} times with workers {failed}"
            if not reason:
                return backend, "; ".join(refusals) if any(gpus) else ""
            refusals.append(f"WeightSync(backend={backend.name!r}): {reason}")
        raise ArgumentError(f"{'; '.join(refusals)}; use backend='auto'")

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, BroadcastSource]:
        chosen, refusals = self._choose(payload.device, peers)
        if refusals and refusals not in self._told:
            self._told.add(refusals)
            log.info("weights are broadcast by %s: %s", chosen.name, refusals)
        backend = chosen.name
        self._current = backend, *peers.values()
        self._groups.keep_only(self._groups.names[-_MAX_GROUPS + 1 :])
        existing = self._groups.names
        for members, left in [*self._joined.items()]:
            if left.group not in existing:
                del self._joined[members]
                self._left.append((time.monotonic(), left))
        self._clear_store()
        joined = self._joined.get(self._current)
        name = f"weights{next(self._counter)}" if joined is None else joined.group
        first = self._joined[self._current] = BroadcastSource(
            group=name,
            rank=0,
            size=len(self._current),
            timeout_s=self._context.timeout_s,
            backend=backend,
            store=self._endpoint,
            kept=(*existing, name),
        )
        self._groups.join(first, self._store, self._context.address)
        return {w: replace(first, rank=rank) for rank, w in enumerate(peers, start=1)}

    def _clear_store(self) -> None:
        """Delete what members of groups that were left have put there for each other."""
        # A member may still look for another one there. Without an answer it would wait, and its
        # connection with the store would serve no other group meanwhile.
        deadline = time.monotonic() - self._context.timeout_s
        while self._left and self._left[0][0] < deadline:
            _, left = self._left.popleft()
            for key in backend_named(left.backend).keys(left):
                self._store.delete_key(f"{left.group}/{key}")

    def send(self, payload: torch.Tensor) -> None:
        first = self._joined[self._current]
        if not first.on_gpu:
            payload = payload.cpu()
        backend, *peers = self._current
        tried = {(backend, peer) for peer in peers}
        try:
            self._groups.broadcast(first, payload)
        except RuntimeError as error:
            failures = self._failures
            failures.update(tried - self._worked)
            if backend != self._backends[-1].name and _MAX_FAILURES in map(failures.get, tried):
                log.warning(
                    "weights are not broadcast by %s any more where it failed %d times: %s",
                    backend,
                    _MAX_FAILURES,
                    error,
                )
            raise
        self._worked |= tried

    def forget(self, peer: int) -> None:
        """A receiver is gone, or failed: its groups can't be used any more."""
        for (_, *members), joined in list(self._joined.items()):
            if peer in members:
                self._groups.drop(joined.group)

    def close(self) -> None:
        self._groups.close()
        self._store = None


class AutoUpdater(TransportUpdater):
    """The default: as :class:`TransportUpdater`, but over RPC with one broadcast to other hosts.

    Where trainer and workers have GPUs, and NCCL can be used, the same holds for GPUs instead of
    hosts: one worker of each GPU but the trainer's is in the broadcast.
    """

    def __init__(self) -> None:
        super().__init__()
        self._broadcast: BroadcastUpdater | None = None

    def attach(self, context: UpdaterContext) -> None:
        super().attach(context)
        if context.calls_suffice:
            return
        if reason := backend_named("gloo").refusal(()):
            log.warning("%s, so weights are not broadcast, but sent by RPC", reason)
        else:
            self._broadcast = BroadcastUpdater()
            self._broadcast.attach(context)

    def _far_sources(
        self, payload: torch.Tensor, far: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        if self._broadcast is None:
            return super()._far_sources(payload, far)
        self.together = True
        return self._broadcast.sources(payload, far)

    def _is_on_gpus(self, device: torch.device, peers: Mapping[int, int]) -> bool:
        return self._broadcast is not None and self._broadcast.is_on_gpus(device, peers)

    def send(self, payload: torch.Tensor) -> None:
        if self.together and self._broadcast is not None:
            self._broadcast.send(payload)

    def forget(self, peer: int) -> None:
        if self._broadcast is not None:
            self._broadcast.forget(peer)

    def close(self) -> None:
        super().close()
        if self._broadcast is not None:
            self._broadcast.close()


class NoUpdater(TransportUpdater):
    """Sends nothing: the workers keep the weights that they started with."""

    def _skip_update(self, worker_id: int) -> bool:
        return True


def default_updater(backend: str) -> WeightUpdaterBase:
    """The updater for ``backend``, see :class:`~distcollect.WeightSync`.

    Raises:
        ArgumentError: this process can't use it.
    """
    if backend == "auto":
        return AutoUpdater()
    wanted = backend_named(backend)
    lacks_gpu = wanted.on_gpu and not torch.cuda.device_count()
    if reason := wanted.refusal([""] if lacks_gpu else ()):
        raise ArgumentError(f"WeightSync(backend={backend!r}): {reason}; use backend='auto'")
    return BroadcastUpdater(backend)
