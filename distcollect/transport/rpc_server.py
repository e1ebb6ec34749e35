"""A worker's side of the RPC transport: what runs in the process that is called.

A rollout that stays here until the trainer fetches it is an RRef of this process. The trainer keeps
the RRef in the form in which torch sends it, and gives it back to be fetched. It makes no ``RRef``
object: torch tells an owner that such an object was dropped by the first agent that a process had,
which may have ended, and for that needs 16-bit numbers of processes that are unique for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed.rpc

from distcollect.errors import RolloutGone
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.failure import Failure
from distcollect.transport.pending_answers import PendingAnswers
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, Service, call_service
from distcollect.transport.rpc_agents import join_agents, leave_agents
from distcollect.transport.worker_service import WorkerService

# Torch declares no types for much of what is used here, private or not.
rpc: Any = torch.distributed.rpc

_Function = TypeVar("_Function", bound=Callable[..., Any])
# An RRef as torch sends it: its owner, its id, the id of the fork (torch's word for the hold that
# one user has on it), and the type of its value.
SentRRef: TypeAlias = tuple[Any, ...]

# An RPC names a function of this module, so what the functions need can't be in an object.
_service: Service | None = None
# The RRefs of this process that a trainer holds, and of these the last rollouts that were offered.
_lent: set[SentRRef] = set()
_offered: deque[SentRRef] = deque()


class RpcServer:
    """Answers calls for a service; a process has one of these at a time.

    Attributes:
        endpoint: where it is reached.
    """

    def __init__(self, service: Service, address: str) -> None:
        """Answer from now on; the rest is as in :func:`.join_agents`."""
        global _service  # noqa: PLW0603 - see above
        self._pending = PendingAnswers()  # it calls nobody
        self._agents = join_agents(address, self._pending)
        self.endpoint = self._agents.endpoint
        _service = service

    def close(self) -> None:
        """Answer no more calls."""
        global _service  # noqa: PLW0603 - see above
        _service = None
        leave_agents(self._agents, self._pending)


def _async_execution(function: _Function) -> _Function:
    return cast("_Function", rpc.functions.async_execution(function))


@_async_execution
def serve_call(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.futures.Future[Any]:
    """Call a method of the service."""
    return _answer(method, args, kwargs)


@_async_execution
def serve_collect(request: CollectRequest) -> torch.futures.Future[Any]:
    """Collect a rollout; answer its header, and its tensors if they are small, else its RRef."""

    def package(rollout: tuple[Header, Tensors]) -> tuple[Header, Any]:
        header, tensors = rollout
        if request.is_inline(tensors):
            return header, tensors
        _offered.append(_lend(tensors))
        if len(_offered) > NUM_SLABS:
            _take_back(_offered.popleft())  # its memory may be written to now
        return header, _offered[-1]

    return _answer(WorkerService.collect.__name__, (request,), {}, package)


@_async_execution
def serve_hand_over(sequence: int, key: str, keep_s: float) -> torch.futures.Future[Any]:
    """Keep a rollout for another trainer; answer what that one needs to fetch it."""

    def package(_: None) -> SentRRef:
        service = cast("WorkerService", _service)
        rref = _lend(key)
        service.handover_outcome(key).add_done_callback(lambda _: _take_back(rref))
        return rref

    return _answer(WorkerService.hand_over.__name__, (sequence, key, keep_s), {}, package)


def serve_rollout(rref: SentRRef, key: str = "", mapped: bool = False) -> list[Any] | Failure:
    """Answer the tensors of a rollout, once.

    Args:
        rref: the rollout's.
        key: of a rollout that was handed over.
        mapped: of the same, say where the tensors lie.
    """
    service = cast("WorkerService", _service)
    tensors = _take_back(rref)
    gone = RolloutGone("its memory has been used again")
    if key:
        try:
            tensors = service.read_handover(key, mapped)
        except RolloutGone as error:
            tensors, gone = None, error
    return Failure.of(gone, service.worker_id) if tensors is None else cast("list[Any]", tensors)


def _lend(value: Any) -> SentRRef:
    """Make an RRef of this process, for one trainer to hold; return it as torch sends it."""
    rref: SentRRef = rpc.RRef(value)._serialize()
    _lent.add(rref)
    return rref


def _take_back(rref: SentRRef) -> Any:
    """End an RRef that a trainer held, and return its value; None if it has ended already."""
    try:
        _lent.remove(rref)
    except KeyError:
        return None
    # An owner that gets a fork of its own back forgets it, and with its last fork the RRef.
    return rpc.PyRRef._deserialize(rref).local_value()


def _answer(
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    package: Callable[[Any], Any] = lambda value: value,
) -> torch.futures.Future[Any]:
    """Return the service's answer as it travels: ``package`` of its value, or a Failure."""
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
