"""This process's agent of ``torch.distributed.rpc``, and the numbers by which it knows its peers.

Torch sends a peer's number as a signed 16-bit integer, and an agent keeps the connection that it
opened for a number, broken or not: a number can't name another process later. So each agent counts
its peers from 1 on, and when the numbers are used up, or too many connections are left over,
another agent takes its place and counts from 1 again. Numbers mean nothing to other processes: two
agents may know a process by different ones, and who only answers calls knows no peer at all.

Torch allows one agent in a process. So all transports of a process share it: the first one starts
it, and the last one that closes ends it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
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
from distcollect.net.interfaces import check_not_public, interface_of, same_address
from distcollect.net.messages import PeerAddress
from distcollect.transport.peer_transport import Peer
from distcollect.transport.pending_answers import PendingAnswer, PendingAnswers
from distcollect.version import TESTED

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
# Torch looks in an agent's store for the address of a process with this name.
_NAME, _ADDRESS_KEY = "member{}", "addrs/member{}"
_LEAVE_TIMEOUT_S = 2.0
# What torch.add takes in a call that only shows whether there is an answer.
PING = (torch.zeros(()), torch.zeros(()))
_FOREVER = 0  # each wait for an answer has its own deadline, so an RPC needs none

_PRIVATE_PARTS = (
    "autograd._init",
    "rpc.TensorPipeAgent._update_group_membership",
    "rpc.PyRRef._serialize",
    "rpc.PyRRef._deserialize",
    "rpc.api._init_rpc_states",
    "rpc.api._finalize_shutdown",
    "rpc.api._is_current_rpc_agent_set",
    "rpc.api._reset_current_rpc_agent",
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class AgentPeer(Peer):
    """A process that a transport of this one can call.

    Attributes:
        info: what torch knows of it, under its number in the agent that calls now.
    """

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
        if missing := missing_symbols():
            raise LaunchError(
                f"torch {torch.__version__} lacks {', '.join(missing)}, which workers that join "
                f"and leave need; use torch {TESTED['torch']}"
            )
        if rpc.api._is_current_rpc_agent_set():
            raise CollectorStateError(
                "this process already runs torch.distributed.rpc (rpc.init_rpc was called); shut "
                "it down first: torch allows one agent a process"
            )
        self.address = address
        # While it is held, the agent that torch calls "current" is not replaced. Reentrant, as
        # garbage may be collected meanwhile, and a collector that nobody refers to is closed then.
        self._lock = threading.RLock()
        self.users: list[PendingAnswers] = []  # of the transports
        self._peers: set[AgentPeer] = set()
        # Agents that were replaced, until the calls that were open then are answered.
        self._old: dict[Any, set[PendingAnswer]] = {}
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
        self.endpoint: str = self._store.get(_ADDRESS_KEY.format(_OWN_NUMBER)).decode()

    def keep(self) -> None:
        """Never destroy the agents in this process, a forked child of the one that started them."""
        for native in (self._agent, self._store, *self._old):
            keep_for_ever(native)

    def _start_agent(self) -> None:
        self._num_enrolled = 0  # peers that the agent knows, and that it has known
        self._store = dist.HashStore()
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_NUM_THREADS,
            rpc_timeout=_FOREVER,
            _transports=_TRANSPORTS,
            _channels=CHANNELS,
        )
        name = _NAME.format(_OWN_NUMBER)
        with _listening_on(interface_of(self.address)):
            agent = rpc.TensorPipeAgent(self._store, name, _OWN_NUMBER, None, options, {}, [])
            if self._agent is not None:
                self._old[self._agent] = self._open()
                rpc.api._reset_current_rpc_agent()
            self._agent = agent
            rpc.api._init_rpc_states(agent)  # starts it: now it looks for its address

    def add(self, address: PeerAddress) -> AgentPeer:
        """Make a process callable.

        Raises:
            LaunchError: there are as many peers as an agent can have.
        """
        peer = AgentPeer(address)
        with self._lock:
            if self._agent is None:
                return peer  # closed
            if len(self._peers) >= _MAX_NUMBER:
                raise LaunchError(
                    f"{len(self._peers)} processes are connected to this one, and torch's RPC "
                    "takes no more: use several trainers"
                )
            if self._num_enrolled >= min(len(self._peers) + _MAX_REMOVED, _MAX_NUMBER):
                log.debug("another agent of torch's RPC replaces the present one")
                self._start_agent()
                for present in self._peers:
                    self._enroll(present)
            self._enroll(peer)
            self._peers.add(peer)
            for agent, pending in list(self._old.items()):
                if pending.isdisjoint(self._open()):
                    del self._old[agent]
                    run_aside(agent.shutdown)  # as it joins the agent's own threads
        return peer

    def _open(self) -> set[PendingAnswer]:
        return {answer for user in self.users for answer in list(user.open)}

    def _enroll(self, peer: AgentPeer) -> None:
        self._num_enrolled += 1
        number = _OWN_NUMBER + self._num_enrolled
        self._store.set(_ADDRESS_KEY.format(number), peer.address.endpoint)
        peer.info = rpc.WorkerInfo(_NAME.format(number), number)
        self._agent._update_group_membership(peer.info, [], {}, True)

    def remove(self, peer: AgentPeer, *, has_ended: bool = True) -> None:
        """Forget a peer; again it does nothing. ``has_ended``: its process has, or is ignored."""
        with self._lock:
            if peer not in self._peers:
                return
            self._peers.remove(peer)
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

    def close(self, *, gently: bool) -> None:
        """End all agents; ``gently``: no answer is pending."""
        if not rpc.api._is_current_rpc_agent_set():
            return
        if gently:
            # Else the agent logs a warning for each peer that ends.
            _within(_LEAVE_TIMEOUT_S, self._agent.join, True)
        # Without the lock: what waits for an answer that fails now may call a peer.
        # The shutdown joins threads that may be blocked.
        ended = _within(_LEAVE_TIMEOUT_S, rpc.api._finalize_shutdown)
        with self._lock:
            replaced, self._old = self._old, {}
        for agent in replaced:
            ended &= _within(_LEAVE_TIMEOUT_S, agent.shutdown)
        if ended:
            # The threads of its pool are idle now. They end when the last reference is gone.
            self._agent = None
        else:
            log.warning("torch's RPC threads did not end within %g s", _LEAVE_TIMEOUT_S)


_shared: RpcAgents | None = None
_sharing = threading.Lock()  # held while agents start and end


def join_agents(address: str, pending: PendingAnswers) -> RpcAgents:
    """Use this process's agents; the first user starts them.

    Args:
        address: this host's, on the interface to listen on; it counts for the first user.
        pending: the answers to the calls of the user.

    Raises:
        CollectorStateError: this process already runs an RPC agent that is not ours.
        LaunchError: this torch lacks a private symbol that is needed, or would listen on a public
            address.
    """
    global _shared  # noqa: PLW0603 - torch allows one agent in a process
    with _sharing:
        if _shared is None:
            _shared = RpcAgents(address)
        agents = _shared
        agents.users.append(pending)
    try:
        _check_listens_on(agents.endpoint, agents.address)
    except LaunchError:
        leave_agents(agents, pending)
        raise
    return agents


def leave_agents(agents: RpcAgents, pending: PendingAnswers) -> None:
    """Be done with :func:`join_agents`, by the same ``pending``; the last user ends the agents.

    Again does nothing.
    """
    global _shared  # noqa: PLW0603 - see above
    with _sharing:
        if pending not in agents.users:
            return
        agents.users.remove(pending)
        if not agents.users:
            agents.close(gently=not pending.open)
            if _shared is agents:
                _shared = None


def _check_listens_on(endpoint: str, address: str) -> None:
    got = ip_address_in(endpoint)
    check_not_public(got)
    if not same_address(got, address):
        log.warning(
            "torch RPC listens on %s instead of %s (because of the variable %s, or because it "
            "takes an interface's first address); workers may not be able to reach it",
            *(got, address, INTERFACE),
        )


def ip_address_in(endpoint: str) -> str:
    """Return the IP address in an agent's endpoint: "uv://[fd00::5]:4711" gives "fd00::5"."""
    return endpoint.rsplit("//", maxsplit=1)[-1].rpartition(":")[0].strip("[]")


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


def missing_symbols() -> list[str]:
    """Return the names of the private parts of torch that are needed and that this torch lacks."""
    missing = []
    for path in _PRIVATE_PARTS:
        try:
            operator.attrgetter(path)(dist)
        except AttributeError:
            missing.append(path.rpartition(".")[2])
    return missing


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
