"""This process's agent of ``torch.distributed.rpc``, and the numbers by which it knows its peers.

Torch sends a peer's number as a signed 16-bit integer, and an agent keeps the connection that it
opened for a number, broken or not: a number can't name another process later. So each agent counts
its peers from 1 on, and when the numbers are used up, or too many connections are left over,
another agent takes its place and counts from 1 again. Numbers mean nothing to other processes: two
agents may know a process by different ones.

Torch allows one agent in a process. So all transports of a process share it: the first one starts
it, and the last one that closes ends it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc

from distcollect.common.forks import keep_for_ever
from distcollect.common.threads import run_aside
from distcollect.errors import CollectorStateError, LaunchError
from distcollect.net.interfaces import interface_of
from distcollect.transport.protocol import PendingAnswers

# Torch declares no types for much of what is used here, private or not.
dist: Any = torch.distributed
rpc: Any = torch.distributed.rpc

INTERFACE = "TP_SOCKET_IFNAME"
CHANNELS = ["cma", "mpt_uv", "basic"]
_TRANSPORTS = ["uv"]
_NUM_THREADS = 4
_MAX_NUMBER = 2**15 - 1
# An agent keeps connections to peers that were removed before they ended: four files each.
_MAX_REMOVED = 64
# The number of every process in its own agent. Torch refuses a second one in the same process.
_OWN_NUMBER = 0
_LEAVE_TIMEOUT_S = 2.0
# What torch.add takes in a call that only shows whether there is an answer.
PING = (torch.zeros(()), torch.zeros(()))
_FOREVER = 0  # each wait for an answer has its own deadline, so an RPC needs none

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentPeer:
    """A process that a transport of this one can call.

    Attributes:
        endpoint: where its agent listens.
        info: what torch knows of it, under its number in the agent that calls now.
    """

    endpoint: str
    info: Any = None


class RpcAgents:
    """The agent that calls peers now, and those before it that still wait for an answer.

    Attributes:
        endpoint: where the first agent listens. Peers answer calls on the connection that the
            calls come on, so nobody needs to know where the next agents listen. For the same
            reason one interface is enough for transports whose peers are on different networks.
        address: of the interface that they were to listen on.
    """

    def __init__(self, address: str) -> None:
        """Start the first agent; see :func:`join_agents`."""
        self._make_agent, self._make_info = _symbols()
        if rpc.api._is_current_rpc_agent_set():
            raise CollectorStateError(
                "this process already runs torch.distributed.rpc (rpc.init_rpc was called); shut "
                "it down first: torch allows one agent a process"
            )
        self.address = address
        # While it is held, the agent that torch calls "current" is not replaced. Reentrant, as
        # garbage may be collected meanwhile, and a collector that nobody refers to is closed then.
        self._lock = threading.RLock()
        self._users: list[PendingAnswers] = []  # of the transports: what their peers owe
        self._peers: set[AgentPeer] = set()
        self._old: list[Any] = []  # agents that still wait for an answer
        self._agent: Any = None
        try:
            dist.autograd._init(_OWN_NUMBER)
        except RuntimeError as error:
            raise CollectorStateError(
                "this process used torch.distributed.rpc before, under a rank above 0 "
                "(rpc.init_rpc was called), and torch gives a process only one: use the collector "
                "in another process"
            ) from error
        self._start_agent()
        self.endpoint: str = self._store.get(_address_key(_name(_OWN_NUMBER))).decode()

    def keep(self) -> None:
        """Never destroy the agents in this process, a forked child of the one that started them."""
        for native in (self._agent, self._store, *self._old):
            keep_for_ever(native)

    def _start_agent(self) -> None:
        self._num_enrolled = 0
        self._num_removed = 0
        self._store = dist.HashStore()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_NUM_THREADS,
            rpc_timeout=_FOREVER,
            _transports=_TRANSPORTS,
            _channels=CHANNELS,
        )
        name = _name(_OWN_NUMBER)
        with _listening_on(interface_of(self.address)):
            agent = self._make_agent(self._store, name, _OWN_NUMBER, None, options, {}, [])
            if self._agent is not None:
                self._retire(self._agent)
                rpc.api._reset_current_rpc_agent()
            self._agent = agent
            rpc.api._init_rpc_states(agent)  # starts it: now it looks for its address

    def _retire(self, agent: Any) -> None:
        """End an agent when all calls that are open now are answered."""
        self._old.append(agent)
        owed = [answer for pending in self._users for answer in pending.open]
        num_owed = len(owed) + 1
        lock = threading.Lock()

        def answered(_: object) -> None:
            nonlocal num_owed
            with lock:
                num_owed -= 1
                is_last = not num_owed
            if is_last:
                # On another thread, as it joins the agent's own ones.
                run_aside(self._end, agent)

        for answer in owed:
            answer.add_done_callback(answered)
        answered(None)

    def _end(self, agent: Any) -> None:
        with self._lock:
            if agent not in self._old:
                return  # close() ends it
            self._old.remove(agent)
        agent.shutdown()

    def add(self, endpoint: str) -> AgentPeer:
        """Make a process callable.

        Raises:
            LaunchError: there are as many peers as an agent can have.
        """
        peer = AgentPeer(endpoint)
        with self._lock:
            if self._agent is None:
                return peer  # closed
            if len(self._peers) >= _MAX_NUMBER:
                raise LaunchError(
                    f"{len(self._peers)} processes are connected to this one, and torch's RPC "
                    "takes no more: use several trainers"
                )
            if self._num_removed >= _MAX_REMOVED or self._num_enrolled >= _MAX_NUMBER:
                log.debug("another agent of torch's RPC replaces the present one")
                self._start_agent()
                for present in self._peers:
                    self._enroll(present)
            self._enroll(peer)
            self._peers.add(peer)
        return peer

    def _enroll(self, peer: AgentPeer) -> None:
        self._num_enrolled += 1
        number = _OWN_NUMBER + self._num_enrolled
        name = _name(number)
        self._store.set(_address_key(name), peer.endpoint)
        peer.info = self._make_info(name, number)
        self._agent._update_group_membership(peer.info, [], {}, True)

    def remove(self, peer: AgentPeer, *, has_ended: bool = True) -> None:
        """Forget a peer; again it does nothing. ``has_ended``: its process has, or is ignored."""
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.remove(peer)
            self._num_removed += 1
            if self._agent is None:
                return
            if has_ended:
                # Torch closes the sockets to a process that has ended when a call to it fails.
                with contextlib.suppress(RuntimeError):
                    rpc.rpc_async(peer.info, torch.add, PING, timeout=_FOREVER)
            self._agent._update_group_membership(peer.info, [], {}, False)

    def call(
        self, peer: AgentPeer, function: Any, args: tuple[Any, ...]
    ) -> torch.futures.Future[Any]:
        """Call a function, or an operator of torch's, in a peer's process.

        Raises:
            RuntimeError: it can't be called any more.
        """
        with self._lock:
            if peer not in self._peers:
                raise RuntimeError("it was removed")
            answer: torch.futures.Future[Any] = rpc.rpc_async(
                peer.info, function, args, timeout=_FOREVER
            )
        return answer

    def use(self, pending: PendingAnswers) -> None:
        """Stay open for one more transport; ``pending``: what its peers owe."""
        with self._lock:
            self._users.append(pending)

    def leave(self, pending: PendingAnswers) -> bool:
        """Be no longer needed by a transport; whether it was the last one."""
        with self._lock:
            if pending not in self._users:
                return False
            self._users.remove(pending)
            return not self._users

    def close(self, *, gently: bool) -> None:
        """End all agents; ``gently``: no answer is owed."""
        if not rpc.api._is_current_rpc_agent_set():
            return
        if gently:
            # Else the agent logs a warning for each peer that ends.
            _within(_LEAVE_TIMEOUT_S, self._agent.join, True)
        # Without the lock: what waits for an answer that fails now may call a peer.
        # The shutdown joins threads that may be blocked.
        ended = _within(_LEAVE_TIMEOUT_S, rpc.api._finalize_shutdown)
        while (old := self._take_old()) is not None:
            ended &= _within(_LEAVE_TIMEOUT_S, old.shutdown)
        if ended:
            # The threads of its pool are idle now. They end when the last reference is gone.
            self._agent = None
        else:
            log.warning("torch's RPC threads did not end within %g s", _LEAVE_TIMEOUT_S)

    def _take_old(self) -> Any:
        with self._lock:
            return self._old.pop() if self._old else None


_shared: RpcAgents | None = None
_sharing = threading.Lock()  # held while agents start and end


def join_agents(address: str, pending: PendingAnswers) -> RpcAgents:
    """This process's agents; the first transport starts them.

    Args:
        address: this host's, on the interface to listen on; it counts for the first transport.
        pending: the answers to the calls of the transport.

    Raises:
        CollectorStateError: this process already runs an RPC agent that is not ours.
        LaunchError: this torch lacks a private symbol that is needed.
    """
    global _shared  # noqa: PLW0603 - torch allows one agent in a process
    with _sharing:
        if _shared is None:
            _shared = RpcAgents(address)
        _shared.use(pending)
        return _shared


def leave_agents(agents: RpcAgents, pending: PendingAnswers, *, gently: bool) -> None:
    """Be done with :func:`join_agents`: the last transport ends the agents; again does nothing.

    Args:
        agents: what was joined.
        pending: what they were joined with.
        gently: no answer is owed to the transport.
    """
    global _shared  # noqa: PLW0603 - see above
    with _sharing:
        if agents.leave(pending):
            agents.close(gently=gently)
            if _shared is agents:
                _shared = None


def _in_child() -> None:
    global _shared, _sharing
    if _shared is not None:
        # A forked child has none of an agent's threads, for which its destructor would wait.
        _shared.keep()
    _shared, _sharing = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _within(timeout_s: float, function: Callable[..., Any], *args: Any) -> bool:
    """Call ``function`` on a thread of its own; whether it ended in time. It may go on after.

    At exit there may be no such thread: there the time is limited by who waits for the closing.
    """
    thread = run_aside(function, *args)
    if thread is None:
        return True
    thread.join(timeout_s)
    return not thread.is_alive()


def _name(number: int) -> str:
    return f"member{number}"


def _address_key(name: str) -> str:
    return f"addrs/{name}"


def missing_symbols() -> list[str]:
    """Names of the private parts of torch that this module needs and this torch lacks."""
    try:
        # A torch built without RPC doesn't have the module.
        from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo  # noqa: F401, PLC0415
    except ImportError:
        return ["torch.distributed.rpc"]
    backend_options = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    unknown = [name for name in ("_transports", "_channels") if name not in backend_options]
    return unknown + [
        name
        for owner, name in (
            (TensorPipeAgent, "_update_group_membership"),
            (rpc.PyRRef, "_serialize"),
            (rpc.PyRRef, "_deserialize"),
            (rpc.api, "_init_rpc_states"),
            (rpc.api, "_finalize_shutdown"),
            (rpc.api, "_is_current_rpc_agent_set"),
            (rpc.api, "_reset_current_rpc_agent"),
            (dist.autograd, "_init"),
        )
        if not hasattr(owner, name)
    ]


def _symbols() -> tuple[Any, Any]:
    """Torch's private classes of an agent, and of what it knows of a peer.

    Raises:
        LaunchError: this torch lacks a private part that is needed.
    """
    if missing := missing_symbols():
        raise LaunchError(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which workers that join and "
            "leave need; use the torch version that constraints/tested.txt names"
        )
    from torch._C._distributed_rpc import TensorPipeAgent, WorkerInfo  # noqa: PLC0415

    return TensorPipeAgent, WorkerInfo


@contextmanager
def _listening_on(interface: str | None) -> Iterator[None]:
    """Let agents made within listen on ``interface``, unless the user's environment names one.

    TensorPipe takes the interface from the environment only.
    """
    if interface is None or INTERFACE in os.environ:
        yield
        return
    os.environ[INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[INTERFACE]
