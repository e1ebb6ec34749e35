"""The protocol by which a trainer talks to its workers; every transport implements it.

The trainer always asks and a worker always answers; a worker never calls the trainer. An answer
comes as a future, so no thread waits for a rollout that is still being collected.

A transport knows nothing of what a worker can do. What that is stands in a protocol class
(:class:`~distcollect.transport.worker_service.WorkerService`), and a call names a method of it::

    answer = transport.call(peer, WorkerService.preempt, sequence)  # the type checker knows it

Which transport a run uses is decided in :mod:`distcollect.transport.start`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import torch

from distcollect.errors import WorkerError
from distcollect.net.messages import PeerAddress
from distcollect.net.server import Connection
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors

P = ParamSpec("P")
T = TypeVar("T")
# Takes an answer, or the error in its place. A rollout has two of these, which is why they are no
# futures: those cost several times as much.
Deliver: TypeAlias = Callable[[Any, BaseException | None], object]

# A rollout of at most this size comes along with its header: one round trip instead of two.
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
        frames: the frames that were asked for before, of all workers; in sync mode, before the
            batch.
        shared: the trainer can map the worker's memory. Filled in by the transport.
        inline_bytes: a rollout whose tensors take no more comes along with its header. The same.
    """

    num_steps: int
    random: bool = False
    fresh: bool = False
    version: int = 0
    frames: int = 0
    shared: bool = False
    inline_bytes: int = INLINE_BYTES

    def is_inline(self, tensors: Sequence[Any]) -> bool:
        """Return True if a rollout's tensors, or what stands for them, come with its header."""
        sent = (each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        return sum(sent) <= self.inline_bytes


class Offer:
    """A rollout that lies ready on its worker, or that has come along with its header."""

    def __init__(self, header: Header, fetch: Callable[[Deliver], object]) -> None:
        """``fetch`` moves the tensors here."""
        self.header = header
        self._fetch: Callable[[Deliver], object] | None = fetch

    def fetch(self, deliver: Deliver) -> None:
        """Move its tensors here; ``deliver`` gets them. May be called once."""
        fetch, self._fetch = self._fetch, None
        assert fetch is not None, "it was fetched or declined before"
        fetch(deliver)

    def decline(self) -> None:
        """Give it up: its tensors don't move (they may have come already with a small header)."""
        self._fetch = None


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


class Server(Protocol):
    """A worker's side of a transport: answers calls for a :class:`Service`.

    Attributes:
        endpoint: where a trainer's transport reaches it.
    """

    endpoint: str

    def close(self) -> None:
        """Answer no more calls."""


class Transport(Protocol):
    """The trainer's side. ``tests/helpers/transport_contract.py`` checks that one keeps this.

    - A peer has an id that is never used twice in a run.
    - Each call, rollout and ping is answered once, by a value or an error. What the service raised
      comes as :meth:`.Failure.error` says. :class:`WorkerLost` comes if the peer has ended, can't
      be reached, is not connected (any more), or the transport is closed: nothing stays unanswered.
    - No method but :meth:`close` waits for a peer, and any thread may call it. Callbacks of answers
      run on threads of the transport, which they must not hold up.
    - However many answers of a peer are pending, it can be asked more; they come in any order.
    - A rollout of at most :data:`INLINE_BYTES` comes with its header; a transport may have somewhat
      larger ones come so, too. All others stay with their worker until they are fetched, or
      :data:`NUM_SLABS` later ones were asked for; then fetching one is an error. If it is declined,
      none of its tensors travels.
    - Tensors that were fetched belong to the caller: nothing that the worker does changes them.
    - If two processes can map each other's memory, tensors are copied from there and not sent.
    - What comes from a peer is unpickled. So one is connected only after it has proven the token.

    Attributes:
        name: by which the user chooses it.
        carries_weights: weights in a call are as fast as a broadcast, for which processes of
            torch.distributed would have to listen.
    """

    name: str
    carries_weights: bool

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
        raised (with :class:`ArgumentError` if it raised that).

        Args:
            peer: the process to call.
            method: as declared in the service's protocol class; only its name travels.
            args: its arguments.
            kwargs: its arguments that are given by name.
        """

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        """Ask for the next rollout; ``deliver`` gets an :class:`Offer` when it lies ready."""

    def ping(self, peer: int) -> Future[Any]:
        """Return what completes if ``peer``'s process is alive, even while its Python is busy."""

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        """Call :meth:`.WorkerService.hand_over`.

        It answers what the other trainer's transport needs beside the key to fetch the rollout; it
        can be pickled.
        """

    def fetch_handover(self, peer: int, key: str, held: Any) -> Future[Tensors]:
        """Move a rollout here that another trainer handed over.

        Args:
            peer: the rollout's worker.
            key: with which it was handed over.
            held: what :meth:`hand_over` answered to the other trainer.
        """

    def connect(
        self, peer: int, address: PeerAddress, connection: Connection | None = None
    ) -> None:
        """Make ``peer`` reachable from here; do nothing if it is already, or this is closed.

        Args:
            peer: its id.
            address: what it said of itself.
            connection: by which it has joined here; None: it has joined another trainer.
        """

    def address_of(self, peer: int) -> PeerAddress | None:
        """Return what another trainer needs to :meth:`connect` to the peer; None if it is gone."""

    def shares_memory(self, peer: int) -> bool:
        """Return whether ``peer`` is on this host, and both can map the other's memory."""

    def host_key(self, peer: int) -> str | None:
        """Return a name that is equal for peers that can map each other's memory.

        None: ``peer`` shares none.
        """

    def disconnect(self, peer: int) -> None:
        """Forget a peer; calls that it has not answered fail. Does nothing if it is not known."""

    def close(self, grace_s: float = 0) -> None:
        """Wait up to ``grace_s`` for pending answers; then give back threads and sockets."""


def methods_of(protocol: type) -> frozenset[str]:
    """Return the names of the public methods that a service's protocol class declares."""
    return frozenset(
        name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"
    )


def call_service(
    service: Service, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
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
