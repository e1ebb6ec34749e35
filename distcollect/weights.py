"""The weight plane: one flat buffer, broadcast to exactly the workers it is meant for.

A push goes in three steps, so that nobody is left hanging in a collective that another never
enters: every receiver says it is ready; those who did broadcast into a spare buffer; each
acknowledges version and checksum. The receivers' engines swap the buffer in between two steps.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from .errors import ArgumentError, WeightsTimeout, WorkerError, WorkerLost
from .flat import LiveWeights, checksum
from .threads import SerialThread, arrives
from .topology import listen
from .transport import Transport

log = logging.getLogger(__name__)

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Groups kept for reuse. Both ends drop the least recently used: a worker takes part in a part of
# the trainer's pushes, in the same order, so it never drops a group that the trainer still has.
_MAX_GROUPS = 8
_NUM_STEPS = 3


@dataclass(frozen=True)
class Push:
    """What a receiver has to know of a push.

    Attributes:
        version: policy_version of these weights.
        group: name of the process group; the first push under a name makes the group.
        backend: "gloo" or "nccl".
        rank: the receiver's rank in it; the trainer is 0.
        size: how many are in it.
        store: host and port of the store where its members find each other.
        timeout_s: for making the group and for the broadcast.
    """

    version: int
    group: str
    backend: str
    rank: int
    size: int
    store: tuple[str, int]
    timeout_s: float


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


class _Groups:
    """Process groups by name, the least recently used dropped first."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._groups: OrderedDict[str, Any] = OrderedDict()

    def broadcast(self, push: Push, store: Any, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` from rank 0; all members of the group must do so together.

        Raises:
            RuntimeError: a member is gone or too late. The group is dropped, ``flat`` may be torn.
        """
        timeout = timedelta(seconds=push.timeout_s)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timeout
        try:
            group = self._get(push, store, timeout)
            group.broadcast([flat], options).wait(timeout)
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
        except RuntimeError:
            self._drop(push.group)
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def clear(self) -> None:
        for name in list(self._groups):
            self._drop(name)

    def _get(self, push: Push, store: Any, timeout: timedelta) -> Any:
        name = push.group
        if name not in self._groups:
            prefixed = dist.PrefixStore(name, store)
            make = self._nccl if push.backend == "nccl" else self._gloo
            self._groups[name] = make(prefixed, push.rank, push.size, timeout)
            while len(self._groups) > _MAX_GROUPS:
                self._drop(next(iter(self._groups)))
        self._groups.move_to_end(name)
        return self._groups[name]

    def _gloo(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no public way
        # The address names the interface, and connections are made on first use: a broadcast
        # needs a tree of them, not all pairs.
        options._devices = [  # noqa: SLF001
            dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=True)
        ]
        options._timeout = timeout  # noqa: SLF001
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def _drop(self, name: str) -> None:
        group = self._groups.pop(name, None)
        # A NCCL kernel that waits for a dead peer would wait for ever.
        if group is not None and group.name() == "nccl":
            group.abort()


class WeightReceiver:
    """A worker's side: receives on a thread of its own while the engine steps."""

    def __init__(self, weights: LiveWeights, address: str) -> None:
        """Receive for ``weights``; ``address`` is this host's, on the interface to use."""
        self._weights = weights
        self._groups = _Groups(address)
        self._store: Any = None
        self._staging: torch.Tensor | None = None
        self._thread = SerialThread("distcollect-weights")

    def ready(self) -> Future[int]:
        """Completes when no earlier push is under way: the version in use next."""
        return self._thread.submit(lambda: self._weights.newest)

    def receive(self, push: Push) -> Future[tuple[int, int]]:
        """Take part in the broadcast; completes with (version, checksum) of what arrived."""
        return self._thread.submit(self._receive, push)

    def close(self) -> None:
        """Receive nothing more."""
        self._thread.close()

    def _receive(self, push: Push) -> tuple[int, int]:
        buffer = self._weights.spare()
        try:
            if self._store is None:
                host, port = push.store
                self._store = dist.TCPStore(
                    host, port, is_master=False, timeout=timedelta(seconds=push.timeout_s)
                )
            arrived = self._landing(buffer, push.backend)
            self._groups.broadcast(push, self._store, arrived)
            received = checksum(arrived)
            if arrived is not buffer:
                buffer.copy_(arrived)
        except BaseException:
            self._weights.discard(buffer)
            raise
        self._weights.commit(buffer, push.version)
        return push.version, received

    def _landing(self, buffer: torch.Tensor, backend: str) -> torch.Tensor:
        """Where the backend can write to: Gloo only to the CPU's memory."""
        if backend == "nccl" or not buffer.is_cuda:
            return buffer
        if self._staging is None:
            self._staging = torch.empty_like(buffer, device="cpu", pin_memory=True)
        return self._staging


class PushHandle:
    """A push on its way.

    Attributes:
        version: the policy_version that is being sent.
        worker_ids: to whom.
    """

    def __init__(
        self, version: int, worker_ids: Sequence[int], outcome: Future[None], timeout_s: float
    ) -> None:
        self.version = version
        self.worker_ids = tuple(worker_ids)
        self._outcome = outcome
        self._timeout_s = timeout_s

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every worker has acknowledged it.

        Raises:
            WeightsTimeout: some didn't within the deadline; names them.
            WorkerLost: a worker died before it had acknowledged.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if not arrives(self._outcome, limit):
            raise WeightsTimeout(
                f"version {self.version} is not acknowledged by all of workers "
                f"{list(self.worker_ids)} after {limit:g} s"
            )
        self._outcome.result()


class WeightSender:
    """The trainer's side: sends one version after the other, in the order of publication."""

    def __init__(self, transport: Transport, address: str, *, timeout_s: float) -> None:
        """Prepare to send.

        Args:
            transport: for the control messages.
            address: this host's, on the interface that reaches the workers.
            timeout_s: for each of a push's three steps.
        """
        self._transport = transport
        self._timeout_s = timeout_s
        self._groups = _Groups(address)
        self._names: dict[tuple[str | int, ...], str] = {}
        self._counter = itertools.count()
        self._thread = SerialThread("distcollect-weights")
        self._closed = threading.Event()
        listener = listen(address)
        self._endpoint = (address, listener.getsockname()[1])
        # TCPStore would listen on every interface; it takes over a socket that is bound already.
        self._store = dist.TCPStore(
            *self._endpoint,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )

    def push(
        self, flat: torch.Tensor, version: int, peers: Mapping[int, int], backend: str = "gloo"
    ) -> PushHandle:
        """Send ``flat`` as ``version``.

        Args:
            flat: the snapshot, uint8; must not be changed any more.
            version: its policy_version.
            peers: ``{worker_id: peer}`` of the receivers.
            backend: "gloo" or "nccl".
        """
        ordered = dict(sorted(peers.items()))
        outcome = self._thread.submit(self._send, flat, version, ordered, backend)
        # Each of the three steps has its own deadline, so this one can't be reached before.
        return PushHandle(version, tuple(ordered), outcome, _NUM_STEPS * self._timeout_s)

    def close(self) -> None:
        """Send nothing more; pushes that have not begun fail."""
        self._closed.set()
        self._thread.close()
        self._groups.clear()

    def _send(self, flat: torch.Tensor, version: int, peers: dict[int, int], backend: str) -> None:
        if self._closed.is_set():
            raise WorkerLost("the collector was shut down before these weights were sent")
        if backend != "nccl":
            flat = flat.cpu()
        ready = {w: self._transport.call(peer, "weights_ready") for w, peer in peers.items()}
        self._gather(ready, f"ready for version {version}")
        members: tuple[str | int, ...] = (backend, *peers.values())
        name = self._names.get(members, "")
        if name not in self._groups:
            name = self._names[members] = f"weights{next(self._counter)}"

        def message(rank: int) -> Push:
            size = len(peers) + 1
            return Push(version, name, backend, rank, size, self._endpoint, self._timeout_s)

        acknowledged = {
            worker_id: self._transport.call(peer, "receive_weights", message(rank))
            for rank, (worker_id, peer) in enumerate(peers.items(), start=1)
        }
        broken: RuntimeError | None = None
        try:
            self._groups.broadcast(message(0), self._store, flat)
        except RuntimeError as error:
            broken = error
        # Also if it broke: who is at fault is told by the acknowledgement that doesn't come.
        answers = self._gather(acknowledged, f"acknowledgement of version {version}")
        if broken is not None:
            raise WorkerLost(f"the broadcast of version {version} broke off") from broken
        expected = (version, checksum(flat))
        for worker_id, received in answers.items():
            if received != expected:
                raise WorkerLost(
                    f"acknowledged (version, checksum) {received} instead of {expected}",
                    worker_id=worker_id,
                )

    def _gather(self, answers: Mapping[int, Future[Any]], what: str) -> dict[int, Any]:
        deadline = time.monotonic() + self._timeout_s
        late = [
            worker_id
            for worker_id, answer in answers.items()
            if not arrives(answer, deadline - time.monotonic())
        ]
        values: dict[int, Any] = {}
        for worker_id, answer in answers.items():
            if worker_id in late:
                continue
            try:
                values[worker_id] = answer.result()
            except WorkerError as error:
                raise WorkerLost(f"no {what}: {error}", worker_id=worker_id) from error
        if late:
            raise WeightsTimeout(f"waited {self._timeout_s:g} s for {what} from workers {late}")
        return values
