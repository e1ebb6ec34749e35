"""How a trainer talks to its workers: the protocol that every transport implements.

The trainer always asks and a worker always answers; a worker never calls the trainer. An answer
comes as a future, so no thread waits for a rollout that is still being collected.

A transport knows nothing of what a worker can do. What that is stands in a protocol class
(:class:`~distcollect.transport.worker_service.WorkerService`), and a call names a method of it::

    answer = transport.call(peer, WorkerService.preempt, sequence)  # the type checker knows it
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from distcollect.common.replies import Reply
from distcollect.common.tracebacks import users_traceback
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    DistCollectError,
    EnvError,
    PolicyError,
    PolicyKeyError,
    PolicySignatureError,
    SpaceError,
    WorkerError,
    WorkerLost,
)
from distcollect.results import EnvFault
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors

P = ParamSpec("P")
T = TypeVar("T")

# A rollout below this size comes along with its header: one round trip instead of two.
INLINE_BYTES = 64 * 1024
# A worker's n-th rollout lies in slab n modulo this: while one is being fetched the next is being
# written. A request for a rollout permits the worker to overwrite that rollout's slab.
NUM_SLABS = 2


class CollectRequest(NamedTuple):
    """Asks a worker for its next rollout.

    Attributes:
        num_steps: T, steps of each of its envs.
        random: draw the actions from the action space instead of asking the policy.
        fresh: no frame may be older than this request (nothing carried over from the last one).
        version: the newest policy_version that the worker has acknowledged.
        shared: the trainer can map the worker's memory. Filled in by the transport.
    """

    num_steps: int
    random: bool = False
    fresh: bool = False
    version: int = 0
    shared: bool = False


class Offer(Protocol):
    """A rollout that lies ready on its worker."""

    header: Header

    def fetch(self) -> Reply[Tensors]:
        """Move its tensors here. May be called once."""

    def decline(self) -> None:
        """Give it up: its tensors don't move (they may have come already with a small header)."""


class Service(Protocol):
    """An object that answers the calls of another process, on threads of the transport.

    Each of its methods returns a value, or a future of one where the answer takes time.

    Attributes:
        worker_id: the worker that errors name.
    """

    worker_id: int

    @property
    def service_methods(self) -> frozenset[str]:
        """Names of the methods that other processes may call."""


class Transport(Protocol):
    """The trainer's side. Peers are named by ids that are never used twice in a run."""

    @overload
    def call(
        self,
        peer: int,
        method: Callable[Concatenate[Any, P], Future[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...

    @overload
    def call(
        self,
        peer: int,
        method: Callable[Concatenate[Any, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of ``peer``'s service.

        The future fails with :class:`WorkerError` if the service doesn't have the method or it
        raised (with :class:`ArgumentError` if it raised that), with :class:`WorkerLost` if the peer
        can't be reached or was disconnected.

        Args:
            peer: the process to call.
            method: as declared in the service's protocol class; only its name travels.
            args: its arguments.
            kwargs: its arguments that are given by name.
        """

    def collect(self, peer: int, request: CollectRequest) -> Reply[Offer]:
        """Ask for the next rollout; the reply comes when it lies ready on the worker."""

    def ping(self, peer: int) -> Future[Any]:
        """Completes if ``peer``'s process is alive, even while its Python code is busy."""

    def address_of(self, peer: int) -> Any:
        """What another process needs to :meth:`connect` to the peer; None if it is gone."""

    def connect(self, peer: int, address: Any) -> None:
        """Make ``peer`` reachable from here; does nothing if it is already."""

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        """Call :meth:`.WorkerService.hand_over`.

        It answers what the other trainer's transport needs to fetch the rollout; it can be pickled.
        """

    def fetch_handover(self, peer: int, held: Any) -> Future[Tensors]:
        """Move a rollout here that another trainer handed over.

        Args:
            peer: the rollout's worker.
            held: what :meth:`hand_over` answered to the other trainer.
        """

    def shares_memory(self, peer: int) -> bool:
        """Whether ``peer`` is on this host, so that each process can map the other's memory."""

    def host_key(self, peer: int) -> str | None:
        """Equal for peers that can map each other's memory; None: ``peer`` shares none."""

    def disconnect(self, peer: int) -> None:
        """Forget a peer; calls that it has not answered fail. Does nothing if it is not known."""

    def close(self, grace_s: float = 0) -> None:
        """Wait up to ``grace_s`` for pending answers; then give back threads and sockets."""


def methods_of(protocol: type) -> frozenset[str]:
    """The names of the public methods that a service's protocol class declares."""
    return frozenset(
        name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"
    )


def call_service(
    service: Service, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Future[Any]:
    """Call a method of ``service`` by name.

    Returns:
        Its answer, or the exception that it raised. WorkerError if its protocol doesn't declare
        the method.
    """
    done: Future[Any] = Future()
    if method not in service.service_methods:
        message = f"{type(service).__name__} has no method {method!r} for other processes"
        done.set_exception(WorkerError(message))
        return done
    try:
        value = getattr(service, method)(*args, **kwargs or {})
    except Exception as error:  # noqa: BLE001 - it is sent to the caller
        done.set_exception(error)
        return done
    if isinstance(value, Future):
        return value
    done.set_result(value)
    return done


PendingAnswer: TypeAlias = Future[Any] | Reply[Any]
AnyOwed = TypeVar("AnyOwed", Future[Any], Reply[Any])


class PendingAnswers:
    """The answers that peers still owe, so that those of a disconnected peer can be failed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[PendingAnswer, int] = {}

    def expect(self, peer: int, answer: AnyOwed) -> AnyOwed:
        """Note that ``peer`` owes this answer, and return it."""
        with self._lock:
            self._peers[answer] = peer
        return answer

    @property
    def open(self) -> list[PendingAnswer]:
        """The answers that are still owed."""
        with self._lock:
            return list(self._peers)

    def complete(
        self, answer: PendingAnswer, value: Any = None, error: BaseException | None = None
    ) -> None:
        """Complete ``answer`` with a value or an error, unless :meth:`fail` did already."""
        with self._lock:
            if self._peers.pop(answer, None) is None:
                return
            if not self._peers:
                self._changed.notify_all()
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def fail(self, peer: int) -> None:
        """Fail all answers of ``peer`` with :class:`WorkerLost`."""
        with self._lock:
            answers = [answer for answer, owner in self._peers.items() if owner == peer]
        for answer in answers:
            self.complete(answer, error=peer_is_gone(peer))

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for all answers; whether all came."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._peers, timeout_s)


def peer_is_gone(peer: int, cause: BaseException | None = None) -> WorkerLost:
    """The error of an answer that will never come."""
    error = WorkerLost(f"peer {peer} is gone: its answer will never come")
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class Failure:
    """An exception that travels from a worker to the trainer as text.

    Attributes:
        kind: name of its class.
        message: what it says.
        worker_id: the worker that raised it.
        remote_traceback: its traceback, see :func:`~distcollect.common.tracebacks.users_traceback`.
        num_env_faults: of an :class:`~distcollect.errors.EnvError`.
        env_faults: of the same.
    """

    kind: str
    message: str
    worker_id: int
    remote_traceback: str
    num_env_faults: int = 0
    env_faults: tuple[EnvFault, ...] = ()

    @classmethod
    def of(cls, error: BaseException, worker_id: int) -> Failure:
        """Describe ``error``."""
        kind = type(error).__name__
        message = str(error)
        if not isinstance(error, DistCollectError):
            message = f"{kind}: {message}"
        text = users_traceback(error)
        if isinstance(error, EnvError):
            faults = error.num_env_faults, error.env_faults
            return cls(kind, message, worker_id, text, *faults)
        return cls(kind, message, worker_id, text)

    def error(self) -> DistCollectError:
        """The exception to raise at the trainer."""
        if plain_error := _PLAIN_ERRORS.get(self.kind):
            return plain_error(f"worker {self.worker_id}: {self.message}")
        error = _WORKER_ERRORS.get(self.kind, WorkerError)(
            self.message, worker_id=self.worker_id, remote_traceback=self.remote_traceback
        )
        if isinstance(error, EnvError):
            error.num_env_faults, error.env_faults = self.num_env_faults, self.env_faults
        return error


# Some arguments turn out to be wrong only when a worker makes the envs.
_PLAIN_ERRORS: dict[str, type[DistCollectError]] = {
    kind.__name__: kind for kind in (ArgumentError, ArgumentTypeError, DeadlineError, SpaceError)
}
_WORKER_ERRORS: dict[str, type[WorkerError]] = {
    kind.__name__: kind for kind in (EnvError, PolicyError, PolicyKeyError, PolicySignatureError)
}
