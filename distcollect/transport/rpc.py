"""The transport over ``torch.distributed.rpc``; only this module and :mod:`.rpc_agents` touch it.

Hub and spoke: a trainer is connected to each of its workers, and a worker to its trainer only. Each
process runs its own TensorPipe agent over a private in-process store; the agents' addresses travel
with the join handshake (:mod:`distcollect.net.framing`). So no process waits for a global group:
joining is O(1), and a worker's death affects its trainer only. This needs a few private symbols of
torch, see :mod:`.rpc_agents`.

The ``shm`` transport and channel are left out, as their reactor thread polls: it would use half a
core or more in every process that waits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed.rpc

from distcollect.common import tensor_cache
from distcollect.common.memory_segment import Segment
from distcollect.common.replies import Reply
from distcollect.common.shared_memory import SharedTensor, map_segment
from distcollect.common.threads import SerialThread
from distcollect.errors import LaunchError, RolloutGone
from distcollect.net.interfaces import check_not_public, same_address
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import (
    INLINE_BYTES,
    NUM_SLABS,
    AnyOwed,
    CollectRequest,
    Failure,
    Offer,
    PendingAnswer,
    PendingAnswers,
    Service,
    call_service,
    peer_is_gone,
)
from distcollect.transport.rpc_agents import (
    INTERFACE,
    PING,
    AgentPeer,
    join_agents,
    leave_agents,
)
from distcollect.transport.worker_service import WorkerService

# Torch declares no types for much of what is used here, private or not.
rpc: Any = torch.distributed.rpc

# Copying less takes no longer than handing it to another thread.
_COPIED_AT_ONCE_BYTES = 512 * 1024

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# What answers calls from others. An RPC names a function of this module, so it can't be an
# attribute of the transport.
_service: Service | None = None
# An RRef as torch sends it: its owner, its id, the id of the fork (torch's word for the hold that
# one user has on it), and the type of its value.
_SentRRef: TypeAlias = tuple[Any, ...]
# The RRefs of this process that a trainer holds, and of these the last rollouts that were offered.
_lent: dict[_SentRRef, None] = {}
_offered: deque[_SentRRef] = deque()


@dataclass(frozen=True)
class PeerAddress:
    """How a process is reached.

    Attributes:
        endpoint: where its agent listens.
        memory_sample: some of its shared memory. If it can be mapped here, both processes are on
            one host, and rollouts are copied straight from there.
    """

    endpoint: str
    memory_sample: Segment | None = None


class RpcTransport:
    """Calls peers, and answers them for a service; a process's transports share its agent.

    Raises:
        CollectorStateError: this process already runs an RPC agent that is not ours.
        LaunchError: this torch lacks a private symbol that is needed, or would listen on a public
            address.
    """

    def __init__(self, *, address: str, service: Service | None = None) -> None:
        """Start the agent.

        Args:
            address: this host's, on the interface to listen on.
            service: answers calls from others; None: there are none. For one transport only.
        """
        global _service  # noqa: PLW0603 - see above
        self._pending = PendingAnswers()
        self._agents = join_agents(address, self._pending)
        if service is not None:
            _service = service
        self._service = service
        self._addresses: dict[int, PeerAddress] = {}
        self._peers: dict[int, AgentPeer] = {}
        self._lock = threading.Lock()  # held while peers are added, and while it is closed
        self._is_closed = False
        self._mapped: dict[int, dict[Segment, torch.Tensor]] = {}  # of peers on this host
        self._copier = SerialThread("distcollect-copy")
        self.endpoint: str = self._agents.endpoint
        self._check_listens_on(self._agents.address)

    def _check_listens_on(self, address: str) -> None:
        got = ip_address_in(self.endpoint)
        try:
            check_not_public(got)
        except LaunchError:
            self.close()
            raise
        if not same_address(got, address):
            log.warning(
                "torch RPC listens on %s instead of %s (because of the variable %s, or because it "
                "takes an interface's first address); workers may not be able to reach it",
                *(got, address, INTERFACE),
            )

    def connect(self, peer: int, address: PeerAddress) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`.

        The peer can answer without being connected to this process.
        """
        with self._lock:
            if peer in self._addresses or self._is_closed:
                return
            self._peers[peer] = self._agents.add(address.endpoint)
            self._addresses[peer] = address
        if address.memory_sample is not None:
            try:
                address.memory_sample.open()
                self._mapped[peer] = {}
            except OSError:
                log.debug("peer %d is on another host, or its memory can't be mapped here", peer)

    def address_of(self, peer: int) -> PeerAddress | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self._addresses.get(peer)

    def call(self, peer: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        answer = self._pending.expect(peer, Future())
        self._ask(answer, peer, _serve_call, (method.__name__, args, kwargs))
        return answer

    def collect(self, peer: int, request: CollectRequest) -> Reply[Offer]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        if peer in self._mapped:
            request = request._replace(shared=True)
        offer = self._pending.expect(peer, Reply())
        self._ask(offer, peer, _serve_collect, (request,), partial(_RpcOffer, self, peer))
        return offer

    def fetch_offered(self, peer: int, data: Any) -> Reply[Tensors]:
        """Move a rollout here, by what came with its header: its RRef, or all of its tensors."""
        if isinstance(data, list):
            sent: Reply[list[Any]] = Reply.of(data)
        else:
            sent = self._pending.expect(peer, Reply())
            self._ask(sent, peer, _serve_offered, (data,))
        return self.copied(peer, sent, Reply())

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`: it answers an RRef."""
        answer = self._pending.expect(peer, Future())
        self._ask(answer, peer, _serve_hand_over, (sequence, key, keep_s))
        return answer

    def fetch_handover(self, peer: int, held: Any) -> Future[Tensors]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        sent = self._pending.expect(peer, Future())
        self._ask(sent, peer, _serve_handover, (held, peer in self._mapped))
        return self.copied(peer, sent, Future())

    def ping(self, peer: int) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`.

        An operator of torch's is answered without the peer's interpreter, whose lock an env may
        hold.
        """
        answer = self._pending.expect(peer, Future())
        self._ask(answer, peer, torch.add, PING)
        return answer

    def shares_memory(self, peer: int) -> bool:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return peer in self._mapped

    def host_key(self, peer: int) -> str | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        address = self._addresses.get(peer)
        sample = None if address is None else address.memory_sample
        return None if sample is None else sample.host

    def disconnect(self, peer: int) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._mapped.pop(peer, None)
        with self._lock:
            self._addresses.pop(peer, None)
            known = self._peers.pop(peer, None)
        if known is not None:
            self._agents.remove(known)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        global _service  # noqa: PLW0603
        with self._lock:
            self._is_closed = True
            self._addresses = {}
            peers, self._peers = self._peers, {}
        self._copier.close()
        all_came = self._pending.wait_for_all(grace_s)
        for known in peers.values():
            self._agents.remove(known, has_ended=False)
        leave_agents(self._agents, self._pending, gently=all_came)
        if self._service is not None:
            _service = None
        for peer in peers:
            self._pending.fail(peer)

    def copied(self, peer: int, sent: PendingAnswer, fetched: AnyOwed) -> AnyOwed:
        """Complete ``fetched`` once ``peer`` has sent a rollout, and return it.

        Args:
            peer: the worker of the rollout.
            sent: tensors, or SharedTensors where this process copies them from the peer's memory.
            fetched: gets the tensors.
        """
        sent.add_done_callback(partial(self._arrived, peer, fetched))
        return fetched

    def _arrived(self, peer: int, fetched: PendingAnswer, sent: PendingAnswer) -> None:
        error = sent.exception()
        if error is None:
            self._copy_shared(peer, sent.result(), fetched)
        else:
            fetched.set_exception(error)

    def _copy_shared(self, peer: int, sent: list[Any], fetched: PendingAnswer) -> None:
        """Complete ``fetched`` with ``sent``, where SharedTensors are replaced by copies."""
        if not any(isinstance(tensor, SharedTensor) for tensor in sent):
            fetched.set_result(sent)
            return

        def copy(tensor: Any) -> torch.Tensor:
            if not isinstance(tensor, SharedTensor):
                return cast("torch.Tensor", tensor)
            mapped = self._mapped[peer]
            if tensor.segment not in mapped:
                mapped[tensor.segment] = map_segment(tensor.segment)
            return tensor_cache.copy_of(tensor.within(mapped[tensor.segment]))

        def copy_all() -> None:
            try:
                tensors = [copy(tensor) for tensor in sent]
            except (KeyError, OSError) as error:
                fetched.set_exception(peer_is_gone(peer, error))
            except Exception as error:  # noqa: BLE001 - raised where the rollout is waited for
                fetched.set_exception(error)
            else:
                fetched.set_result(tensors)

        if sum(tensor.nbytes for tensor in sent) > _COPIED_AT_ONCE_BYTES:
            self._copier.submit(copy_all)
        else:
            copy_all()

    def _ask(
        self,
        answer: PendingAnswer,
        peer: int,
        function: Any,
        args: tuple[Any, ...],
        read: Callable[[Any], Any] | None = None,
    ) -> None:
        """Call a function in a peer's process; ``answer`` gets what ``read`` makes of the value."""
        if peer not in self._addresses:
            self._pending.complete(answer, error=peer_is_gone(peer))
            return

        def deliver(done: torch.futures.Future[Any]) -> None:
            try:
                outcome = done.value()
            except Exception as error:  # noqa: BLE001 - torch has no type for a broken connection
                self._pending.complete(answer, error=peer_is_gone(peer, error))
                return
            if isinstance(outcome, Failure):
                self._pending.complete(answer, error=outcome.error())
            else:
                self._pending.complete(answer, outcome if read is None else read(outcome))

        try:
            known = self._peers[peer]
            self._agents.call(known, function, args).add_done_callback(deliver)
        except (KeyError, RuntimeError) as error:
            self._pending.complete(answer, error=peer_is_gone(peer, error))
        except Exception as error:  # noqa: BLE001 - an argument can't be pickled: nothing was sent
            self._pending.complete(answer, error=error)


class _RpcOffer:
    """A rollout behind an RRef that its worker owns, or one that came along with its header."""

    def __init__(self, transport: RpcTransport, peer: int, sent: tuple[Header, Any]) -> None:
        self.header, self._data = sent
        self._transport = transport
        self._peer = peer

    def fetch(self) -> Reply[Tensors]:
        data, self._data = self._data, None
        return self._transport.fetch_offered(self._peer, data)

    def decline(self) -> None:
        self._data = None


def _async_execution(function: _Function) -> _Function:
    return cast("_Function", rpc.functions.async_execution(function))


# These run in the process that is called.


@_async_execution
def _serve_call(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.futures.Future[Any]:
    return _answer(method, args, kwargs, lambda value: value)


@_async_execution
def _serve_collect(request: CollectRequest) -> torch.futures.Future[Any]:
    def package(rollout: tuple[Header, Tensors]) -> tuple[Header, Any]:
        header, tensors = rollout
        sent_bytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        if sent_bytes <= INLINE_BYTES:
            return header, tensors
        _offered.append(_lend(tensors))
        if len(_offered) > NUM_SLABS:
            _end(_offered.popleft())  # its memory may be written to now
        return header, _offered[-1]

    return _answer(WorkerService.collect.__name__, (request,), {}, package)


def _serve_offered(rref: _SentRRef) -> Tensors | Failure:
    try:
        return cast("Tensors", _take_back(rref))
    except RolloutGone as error:
        return _failure(error)


@_async_execution
def _serve_hand_over(sequence: int, key: str, keep_s: float) -> torch.futures.Future[Any]:
    def package(key: str) -> tuple[_SentRRef, str]:
        service = cast("WorkerService", _service)
        rref = _lend(partial(service.read_handover, key))
        service.handover_outcome(key).add_done_callback(lambda _: _end(rref))
        return rref, key

    return _answer(WorkerService.hand_over.__name__, (sequence, key, keep_s), {}, package)


def _serve_handover(held: tuple[_SentRRef, str], mapped: bool) -> list[Any] | Failure:
    rref, key = held
    try:
        read = _take_back(rref)
    except RolloutGone:
        read = partial(cast("WorkerService", _service).read_handover, key)  # it says why
    try:
        return cast("list[Any]", read(mapped))
    except RolloutGone as error:
        return _failure(error)


def _lend(value: Any) -> _SentRRef:
    """Make an RRef of this process, for one trainer to hold; return it as torch sends it.

    The trainer keeps it in that form, and makes no ``RRef`` object of it: torch tells an owner that
    such an object was dropped by the first agent that a process had, which may have ended, and for
    that needs 16-bit numbers of processes that are unique for ever.
    """
    rref: _SentRRef = rpc.RRef(value)._serialize()
    _lent[rref] = None
    return rref


def _take_back(rref: _SentRRef) -> Any:
    """Return the value of an RRef that a trainer held, and end the RRef.

    Raises:
        RolloutGone: it has ended already.
    """
    try:
        del _lent[rref]
    except KeyError:
        raise RolloutGone("its memory has been used again") from None
    # An owner that gets a fork of its own back forgets it, and with its last fork the RRef.
    return rpc.PyRRef._deserialize(rref).local_value()


def _end(rref: _SentRRef) -> None:
    with contextlib.suppress(RolloutGone):
        _take_back(rref)


def _failure(error: RolloutGone) -> Failure:
    return Failure.of(error, -1 if _service is None else _service.worker_id)


def _answer(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any], package: Callable[[Any], Any]
) -> torch.futures.Future[Any]:
    """The service's answer as it travels: ``package`` of what it returned, or a Failure."""
    answer: torch.futures.Future[Any] = torch.futures.Future()
    service = _service
    if service is None:
        raise RuntimeError("this process answers no calls, or no longer")

    def deliver(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(package(done.result()))
        else:
            answer.set_result(Failure.of(error, service.worker_id))

    call_service(service, method, args, kwargs).add_done_callback(deliver)
    return answer


def ip_address_in(endpoint: str) -> str:
    """The IP address in an agent's endpoint: "uv://[fd00::5]:4711" gives "fd00::5"."""
    return endpoint.rsplit("//", maxsplit=1)[-1].rpartition(":")[0].strip("[]")
