"""The transport over ``torch.distributed.rpc``; the only module that touches it.

Hub and spoke: a process's RPC world is itself and those it was told of. Each process runs its own
TensorPipe agent over a private in-process store, and the agents' addresses travel with the join
handshake (:mod:`.link`). So nobody waits for a global group: joining is O(1), and a dead worker
concerns nobody but its trainer. This needs a few private symbols of torch, see :func:`_symbols`.

The ``shm`` transport and channel are left out, as their reactor thread polls: half a core or more
for every process that merely waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed.autograd
import torch.distributed.rpc

from distcollect.common import tensor_cache as recycler
from distcollect.common.shared_memory import Segment, SharedTensor
from distcollect.common.threads import SerialThread
from distcollect.errors import CollectorStateError, LaunchError
from distcollect.net.interfaces import check_not_public, interface_of, same_address
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import (
    INLINE_BYTES,
    CollectRequest,
    Failure,
    Offer,
    Pending,
    Service,
    as_future,
    lost,
)

# Torch declares no types for much of what is used here, private or not.
dist: Any = torch.distributed
rpc: Any = torch.distributed.rpc

_INTERFACE = "TP_SOCKET_IFNAME"
_TRANSPORTS = ["uv"]
_CHANNELS = ["cma", "mpt_uv", "basic"]
_NUM_THREADS = 4
# Copying less takes no longer than handing it to another thread.
_COPIED_AT_ONCE_BYTES = 512 * 1024
_LEAVE_TIMEOUT_S = 2.0
_PING = (torch.zeros(()), torch.zeros(()))

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FOREVER = 0  # every wait on a future has its own deadline; an RPC that merely lasts is no error

# What a worker serves. Incoming calls name functions of this module, so it can't live in an object.
_service: Service | None = None


class RpcTransport:
    """This process's agent: calls peers, and answers them for a service.

    Raises:
        CollectorStateError: this process already runs an RPC agent that is not ours.
        LaunchError: this torch lacks a private symbol that is needed, or would listen on a public
            address.
    """

    def __init__(self, my_id: int, *, address: str, service: Service | None = None) -> None:
        """Start the agent.

        Args:
            my_id: this process's id, unique in the run and the same for the process's whole life.
            address: this host's, on the interface to listen on.
            service: what answers calls from others.
        """
        global _service  # noqa: PLW0603 - see above
        agent_class, _ = _symbols()
        if rpc.api._is_current_rpc_agent_set():
            raise CollectorStateError(
                "this process already runs torch.distributed.rpc (rpc.init_rpc was called, or "
                "another collector is open); shut it down first: torch allows one agent a process"
            )
        _service = service
        self._pending = Pending()
        self._peers: dict[int, tuple[str, Segment | None]] = {}  # and how they are reached
        self._mapped: dict[int, dict[Segment, torch.Tensor]] = {}
        self._copier = SerialThread("distcollect-copy")
        self._store = dist.HashStore()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_NUM_THREADS,
            rpc_timeout=_FOREVER,
            _transports=_TRANSPORTS,
            _channels=_CHANNELS,
        )
        dist.autograd._init(my_id)
        with _listening_on(interface_of(address)):
            self._agent: Any = agent_class(self._store, _name(my_id), my_id, None, options, {}, [])
            rpc.api._init_rpc_states(self._agent)  # starts it: now it looks for its address
        self.endpoint: str = self._store.get(_address_key(my_id)).decode()
        self._check_listens_on(address)

    def _check_listens_on(self, address: str) -> None:
        got = address_of(self.endpoint)
        try:
            check_not_public(got)
        except LaunchError:
            self.close()
            raise
        if not same_address(got, address):
            log.warning(
                "torch RPC listens on %s, not on %s by which others come: it was told so by %s, or "
                "takes the interface's first address; they may not get there",
                *(got, address, _INTERFACE),
            )

    def connect(self, peer: int, endpoint: str, sample: Segment | None = None) -> None:
        """Make ``peer``, whose agent listens at ``endpoint``, reachable from here.

        Args:
            peer: its id.
            endpoint: its agent's address.
            sample: some of its memory. If it can be mapped here, both are on one host, and
                rollouts are copied straight from there.
        """
        self._store.set(_address_key(peer), endpoint)
        self._set_member(peer, present=True)
        self._peers[peer] = (endpoint, sample)
        if sample is not None:
            try:
                sample.map()
                self._mapped[peer] = {}
            except OSError:
                log.debug("peer %d is on another host, or its memory is closed to us", peer)

    def call(self, peer: int, method: str, *args: Any) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self._ask(peer, _serve_call, method, args)

    def collect(self, peer: int, request: CollectRequest) -> Future[Offer]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        offer: Future[Offer] = Future()

        def deliver(done: Future[tuple[Header, Any]]) -> None:
            error = done.exception()
            if error is None:
                header, data = done.result()
                offer.set_result(_RpcOffer(self, peer, header, data))
            else:
                offer.set_exception(error)

        request = replace(request, shared=peer in self._mapped)
        self._ask(peer, _serve_collect, request).add_done_callback(deliver)
        return offer

    def contact(self, peer: int) -> tuple[str, Segment | None] | None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return self._peers.get(peer)

    def meet(self, peer: int, contact: tuple[str, Segment | None]) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`.

        The peer needn't know of us to answer.
        """
        if peer not in self._peers:
            self.connect(peer, *contact)

    def take(self, peer: int, key: str) -> Future[Tensors]:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        taken: Future[Tensors] = Future()

        def arrived(sent: Future[list[Any]]) -> None:
            error = sent.exception()
            if error is not None:
                taken.set_exception(error)
            else:
                self.complete(peer, sent.result(), taken)

        self.call(peer, "take_over", key, peer in self._mapped).add_done_callback(arrived)
        return taken

    def ping(self, peer: int) -> Future[Any]:
        """See :class:`~distcollect.transport.protocol.Transport`.

        An operator of torch's is answered without the peer's interpreter, whose lock an env may
        hold.
        """
        return self._ask(peer, torch.add, *_PING)

    def is_near(self, peer: int) -> bool:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        return peer in self._mapped

    def evict(self, peer: int) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        self._mapped.pop(peer, None)
        if peer in self._peers:
            del self._peers[peer]
            self._set_member(peer, present=False)
        self._pending.fail(peer)

    def close(self, grace_s: float = 0) -> None:
        """See :class:`~distcollect.transport.protocol.Transport`."""
        global _service  # noqa: PLW0603
        peers, self._peers = self._peers, {}
        self._copier.close()
        if rpc.api._is_current_rpc_agent_set():
            if self._pending.settled(grace_s):
                self._leave()
            rpc.api._ignore_rref_leak = True  # RRefs of dead workers can't be told
            # It joins threads that may be in the middle of anything.
            if _within(_LEAVE_TIMEOUT_S, rpc.api._finalize_shutdown):
                # Its pool's threads, idle now, end only when nobody holds it any more.
                self._agent = None
            else:
                log.warning("torch's RPC threads did not end within %g s", _LEAVE_TIMEOUT_S)
        _service = None
        for peer in peers:
            self._pending.fail(peer)

    def complete(self, peer: int, sent: list[Any], fetched: Future[Tensors]) -> None:
        """Complete ``fetched`` with what came, and tensors of our own for those ``peer`` shares."""
        if not any(isinstance(tensor, SharedTensor) for tensor in sent):
            fetched.set_result(sent)
            return

        def copy(tensor: Any) -> torch.Tensor:
            if not isinstance(tensor, SharedTensor):
                return cast("torch.Tensor", tensor)
            mapped = self._mapped[peer]
            if tensor.segment not in mapped:
                mapped[tensor.segment] = tensor.segment.map()
            return recycler.copy_of(tensor.within(mapped[tensor.segment]))

        def copy_all() -> None:
            try:
                tensors = [copy(tensor) for tensor in sent]
            except (KeyError, OSError) as error:
                gone = lost(peer)
                gone.__cause__ = error
                fetched.set_exception(gone)
            else:
                fetched.set_result(tensors)

        if sum(tensor.nbytes for tensor in sent) > _COPIED_AT_ONCE_BYTES:
            self._copier.submit(copy_all)
        else:
            copy_all()

    def _leave(self) -> None:
        """Tell the agent that it is to end: it then takes its peers' ends as a matter of course.

        Otherwise it logs a warning for each. It waits without a bound for the last releases of
        RRefs to be answered, so it does that on a thread that can be left behind.
        """
        _within(_LEAVE_TIMEOUT_S, self._agent.join, True)

    def _ask(self, peer: int, function: Any, *args: Any) -> Future[Any]:
        answer = self._pending.open(peer)
        if peer not in self._peers:
            self._pending.settle(answer, error=lost(peer))
            return answer

        def deliver(done: torch.futures.Future[Any]) -> None:
            try:
                outcome = done.value()
            except Exception as error:  # noqa: BLE001 - torch has no type for a broken connection
                gone = lost(peer)
                gone.__cause__ = error
                self._pending.settle(answer, error=gone)
                return
            if isinstance(outcome, Failure):
                self._pending.settle(answer, error=outcome.error())
            else:
                self._pending.settle(answer, outcome)

        try:
            rpc.rpc_async(_name(peer), function, args, timeout=_FOREVER).add_done_callback(deliver)
        except RuntimeError as error:
            gone = lost(peer)
            gone.__cause__ = error
            self._pending.settle(answer, error=gone)
        return answer

    def _set_member(self, peer: int, *, present: bool) -> None:
        _, info_class = _symbols()
        agent = self._agent
        if agent is not None:  # else this is closed
            agent._update_group_membership(info_class(_name(peer), peer), [], {}, present)


class _RpcOffer:
    """A rollout that lies on a worker behind an RRef, or came along with its header."""

    def __init__(self, transport: RpcTransport, peer: int, header: Header, data: Any) -> None:
        self.header = header
        self._transport = transport
        self._peer = peer
        self._data = data

    def fetch(self) -> Future[Tensors]:
        data, self._data = self._data, None
        fetched: Future[Tensors] = Future()
        if isinstance(data, list):
            self._transport.complete(self._peer, data, fetched)
            return fetched

        # The worker may use the memory again once the RRef is gone, so it has to live until then.
        def arrived(sent: Future[list[Any]], _kept: Any = data) -> None:
            error = sent.exception()
            if error is not None:
                fetched.set_exception(error)
            else:
                self._transport.complete(self._peer, sent.result(), fetched)

        self._transport._ask(self._peer, _serve_value, data).add_done_callback(arrived)
        return fetched

    def decline(self) -> None:
        self._data = None


def _async_execution(function: _Function) -> _Function:
    decorated: _Function = rpc.functions.async_execution(function)
    return decorated


@_async_execution
def _serve_call(method: str, args: tuple[Any, ...]) -> torch.futures.Future[Any]:
    return _answer(method, args, lambda value: value)


@_async_execution
def _serve_collect(request: CollectRequest) -> torch.futures.Future[Any]:
    def package(rollout: tuple[Header, Tensors]) -> tuple[Header, Any]:
        header, tensors = rollout
        sent_bytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return header, tensors if sent_bytes <= INLINE_BYTES else rpc.RRef(tensors)

    return _answer("collect", (request,), package)


def _serve_value(rref: Any) -> Tensors:
    value: Tensors = rref.local_value()
    return value


def _answer(method: str, args: tuple[Any, ...], package: Any) -> torch.futures.Future[Any]:
    answer: torch.futures.Future[Any] = torch.futures.Future()
    service = _service
    if service is None:
        raise RuntimeError("this process serves nothing (any more)")

    def deliver(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(package(done.result()))
        else:
            answer.set_result(Failure.of(error, service.worker_id))

    as_future(service, method, *args).add_done_callback(deliver)
    return answer


def _within(timeout_s: float, function: Callable[..., Any], *args: Any) -> bool:
    """Call ``function`` on a thread that is left behind if it takes longer; whether it was done."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _name(peer: int) -> str:
    return f"member{peer}"


def _address_key(peer: int) -> str:
    return f"addrs/{_name(peer)}"


def address_of(endpoint: str) -> str:
    """The IP address in an agent's endpoint: "uv://[fd00::5]:4711" gives "fd00::5"."""
    return endpoint.rsplit("//", maxsplit=1)[-1].rpartition(":")[0].strip("[]")


def missing_symbols() -> list[str]:
    """The private parts of torch that hub and spoke needs, and this one lacks."""
    try:
        # A torch that is built without RPC doesn't have the module.
        from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo  # noqa: F401, PLC0415
    except ImportError:
        return ["torch.distributed.rpc"]
    return [
        name
        for owner, name in (
            (TensorPipeAgent, "_update_group_membership"),
            (rpc.api, "_init_rpc_states"),
            (rpc.api, "_finalize_shutdown"),
            (rpc.api, "_is_current_rpc_agent_set"),
            (dist.autograd, "_init"),
        )
        if not hasattr(owner, name)
    ]


def _symbols() -> tuple[Any, Any]:
    """The private classes of torch that hub and spoke needs.

    Raises:
        LaunchError: this torch has them no more.
    """
    if missing := missing_symbols():
        raise LaunchError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which workers that join and "
            "leave need; use a torch version that the constraints file names"
        )
    from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo  # noqa: PLC0415

    return TensorPipeAgent, WorkerInfo


@contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    """TensorPipe takes its interface from the environment only; the user's own setting wins."""
    if interface is None or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
