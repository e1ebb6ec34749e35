"""How a trainer talks to its workers: the protocol that every transport implements.

The trainer always asks and a worker always answers; a worker never calls the trainer. An answer
comes as a future, so nobody's thread waits for a rollout that is still being collected.
"""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    DistCollectError,
    EnvError,
    PolicyError,
    SpaceError,
    WorkerError,
    WorkerLost,
)
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors

# A rollout below this size comes along with its header: one round trip instead of two.
INLINE_BYTES = 64 * 1024
# A worker's n-th rollout lies in slab n modulo this: while one is being fetched the next is being
# written. To ask for a rollout is to permit that its slab is written over.
NUM_SLABS = 2


@dataclass(frozen=True)
class CollectRequest:
    """Asks a worker for its next rollout.

    Attributes:
        num_steps: T, steps of each of its envs.
        random: draw the actions from the action space instead of asking the policy.
        fresh: no frame may be older than this request (nothing carried over from the last one).
        version: the newest one that the worker has acknowledged.
        shared: the trainer can map the worker's memory. The transport's to say.
    """

    num_steps: int
    random: bool = False
    fresh: bool = False
    version: int = 0
    shared: bool = False


class Offer(Protocol):
    """A rollout that lies ready on its worker."""

    header: Header

    def fetch(self) -> Future[Tensors]:
        """Move its tensors here. May be called once."""

    def decline(self) -> None:
        """Give it up: its tensors don't move (they may have come already with a small header)."""


class Service(Protocol):
    """The worker's side: what a transport calls there, on a thread of its own.

    Each method returns a value, or a future of one where the answer takes time.
    """

    worker_id: int

    def configure(self, payload: bytes) -> Future[Any]:
        """Build envs and policy and try them out; a :class:`~.worker.Probe`."""

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        """Collect one rollout."""

    def preempt(self, sequence: int) -> None:
        """If its rollout of this number is being collected, end it with the frames that it has."""


class Transport(Protocol):
    """The trainer's side. Peers are named by ids that are never used twice in a run."""

    def call(self, peer: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of ``peer``'s service.

        The future fails with :class:`WorkerError` if the method raised (with
        :class:`ArgumentError` if it raised that), with :class:`WorkerLost` if the peer can't be
        reached or was evicted.
        """

    def collect(self, peer: int, request: CollectRequest) -> Future[Offer]:
        """Ask for the next rollout; the future completes when it lies ready on the worker."""

    def ping(self, peer: int) -> Future[Any]:
        """Completes when ``peer``'s process gives a sign of life, whatever its Python code does."""

    def contact(self, peer: int) -> Any:
        """How another process can :meth:`meet` the peer; None if it is gone."""

    def meet(self, peer: int, contact: Any) -> None:
        """Make a peer of another process reachable from here; nothing if it is already."""

    def take(self, peer: int, key: str) -> Future[Tensors]:
        """Move a rollout here that another trainer handed over, see :mod:`.handover`."""

    def is_near(self, peer: int) -> bool:
        """Whether ``peer`` is on this host, and each of us can map the other's memory."""

    def evict(self, peer: int) -> None:
        """Forget a peer. What was asked of it and is not answered fails. Again is no error."""

    def close(self, grace_s: float = 0) -> None:
        """Wait up to ``grace_s`` for answers still owed; then give back threads and sockets."""


class Pending:
    """The answers a transport still owes, so that those of an evicted peer can be failed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owed: dict[Future[Any], int] = {}

    def open(self, peer: int) -> Future[Any]:
        """A future for an answer that ``peer`` owes."""
        answer: Future[Any] = Future()
        with self._lock:
            self._owed[answer] = peer
        return answer

    def settle(
        self, answer: Future[Any], value: Any = None, error: BaseException | None = None
    ) -> None:
        """Complete ``answer``, unless its peer was evicted meanwhile."""
        with self._lock:
            if self._owed.pop(answer, None) is None:
                return
            self._changed.notify_all()
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def fail(self, peer: int) -> None:
        """Fail all that ``peer`` owes with :class:`WorkerLost`."""
        with self._lock:
            owed = [answer for answer, owner in self._owed.items() if owner == peer]
        for answer in owed:
            self.settle(answer, error=lost(peer))

    def settled(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until nothing is owed; whether that is so."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._owed, timeout_s)


def as_future(service: Service, name: str, *args: Any) -> Future[Any]:
    """Call a method of ``service``; what it returns or raises, as a future if it isn't one."""
    done: Future[Any] = Future()
    try:
        value = getattr(service, name)(*args)
    except Exception as error:  # noqa: BLE001 - shipped to whoever asked
        done.set_exception(error)
        return done
    if isinstance(value, Future):
        return value
    done.set_result(value)
    return done


def lost(peer: int) -> WorkerLost:
    """The error of an answer that will never come."""
    return WorkerLost(f"peer {peer} is gone: its answer will never come")


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker to the trainer, as plain text."""

    kind: str
    message: str
    worker_id: int
    remote_traceback: str

    @classmethod
    def of(cls, error: BaseException, worker_id: int) -> Failure:
        """Describe ``error``, with the traceback of what caused it first."""
        kind = type(error).__name__
        message = str(error)
        if not isinstance(error, DistCollectError):
            message = f"{kind}: {message}"
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return cls(kind, message, worker_id, "".join(lines))

    def error(self) -> DistCollectError:
        """The exception to raise at the trainer."""
        if plain_error := _PLAIN_ERRORS.get(self.kind):
            return plain_error(f"worker {self.worker_id}: {self.message}")
        return _WORKER_ERRORS.get(self.kind, WorkerError)(
            self.message, worker_id=self.worker_id, remote_traceback=self.remote_traceback
        )


# An argument may turn out to be wrong only when a worker makes the envs.
_PLAIN_ERRORS: dict[str, type[DistCollectError]] = {
    kind.__name__: kind for kind in (ArgumentError, ArgumentTypeError, DeadlineError, SpaceError)
}
_WORKER_ERRORS: dict[str, type[WorkerError]] = {
    kind.__name__: kind for kind in (EnvError, PolicyError)
}
