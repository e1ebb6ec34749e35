"""The side of the trainer that hands rollouts over to others, see :mod:`.handover`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from distcollect.common.threads import LOOK_UP_S, arrives
from distcollect.errors import ArgumentError, DeadlineError, RolloutGone, WorkerError, WorkerLost
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout, Tensors
from distcollect.trainer.fetcher import RolloutFetcher
from distcollect.trainer.pool_wait import PoolWait
from distcollect.trainer.requests import Requests
from distcollect.trainer.worker_slots import RolloutRequest
from distcollect.transport.peer_ids import identity
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerService

# At the end, for workers to say which of the rollouts that they keep were taken after all.
_TAKE_BACK_S = 2.0


class HandoverSender:
    """Has workers keep rollouts for others to take. All is called with the pool's lock held."""

    def __init__(
        self, transport: Transport, requests: Requests, fetcher: RolloutFetcher, wait: PoolWait
    ) -> None:
        """Nothing is given yet; for the arguments see :class:`~.pool.Pool`, which makes them."""
        self._transport = transport
        self._requests = requests
        self._fetcher = fetcher
        self._wait = wait
        self._untaken = "not_taken"  # the cause for one that nobody took

    def next(self, keep_s: float) -> Callable[[], tuple[RolloutRequest, str] | None]:
        """What gives the next rollout, with its key, once its worker keeps it or it came here."""
        given: tuple[RolloutRequest, str] | None = None

        def ready() -> tuple[RolloutRequest, str] | None:
            nonlocal given
            if given is None or given[0].failed:
                given = self._give(keep_s)
            if given is None:
                return None
            request, _ = given
            return given if request.kept or request.rollout is not None else None

        return ready

    def _give(self, keep_s: float) -> tuple[RolloutRequest, str] | None:
        """Have a worker keep what lies there, if anything does; with its key."""
        self._fetcher.give_up_stale()
        request = self._requests.to_hand_over()
        if request is None:
            return None
        key = secrets.token_hex(8)
        if request.rollout is not None:
            self._requests.deliver(request)
        else:
            self._keep(request, key, keep_s)
        return request, key

    def _keep(self, request: RolloutRequest, key: str, keep_s: float) -> None:
        """Have its worker keep a rollout, and account for it."""
        slot, call = request.slot, self._transport.call
        self._requests.keep(request, key)

        def over(taken: bool) -> None:
            self._requests.keep_no_longer(request, None if taken else self._untaken)

        def kept(_: None) -> None:
            request.kept = True
            self._fetcher.then(
                slot, call(slot.peer, WorkerService.handover_outcome, key), over, lost
            )

        lost = partial(self._requests.keep_no_longer, request, "worker_lost")
        answer = call(slot.peer, WorkerService.hand_over, request.number, key, keep_s)
        self._fetcher.then(slot, answer, kept, lost)

    def take_back(self) -> None:
        """Learn for certain which of the rollouts that may still be taken were."""
        self._untaken = "shut_down"
        for request, key in self._requests.kept.items():
            self._transport.call(request.slot.peer, WorkerService.cancel_handover, key)
        deadline = time.monotonic() + _TAKE_BACK_S
        while self._requests.kept and (remaining := deadline - time.monotonic()) > 0:
            self._wait.changed.wait(min(remaining, LOOK_UP_S))


T = TypeVar("T")


@dataclass(frozen=True)
class RolloutReference:
    """A rollout that another trainer can take from its worker; small, and made to be pickled.

    Use its properties; the attributes below are for :meth:`RPCDataCollector.take_over`.

    Attributes:
        trainer: which of the run's trainers handed it over.
        run_id: the run's id.
        header: what is known of the rollout.
        layout: what its frames consist of.
        peer: its worker's id on the wire.
        contact: where the worker can be reached; None: it is gone.
        key: a secret that gives access to the rollout.
        tensors: the rollout itself, if it had been fetched before it was handed over.
    """

    trainer: int
    run_id: str
    header: Header
    layout: Layout = field(repr=False)
    peer: int = field(repr=False)
    contact: Any = field(repr=False)
    key: str = field(repr=False)
    tensors: Tensors | None = field(default=None, repr=False)

    @property
    def worker_id(self) -> int:
        """The worker that collected it: one of the trainer's that handed it over."""
        return self.header.worker_id

    @property
    def num_frames(self) -> int:
        """Frames in it."""
        return self.header.num_frames

    @property
    def policy_version(self) -> tuple[int, int]:
        """The lowest and the highest version among its frames."""
        return self.header.policy_version

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return self.header.num_bytes


class HandoverReceiver:
    """A trainer's side: takes rollouts that were handed over from their workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # One for each worker: that of an earlier process may hold memory of it.
        self._peers: dict[tuple[int, int], int] = {}

    def take(self, reference: RolloutReference, timeout_s: float) -> Rollout:
        """Move a rollout here.

        Raises:
            ArgumentError: it is of another run.
            RolloutGone: it can't be had; names the worker, and says why.
            DeadlineError: the worker did not answer in time; names it.
        """
        if reference.tensors is not None:
            return Rollout(reference.header, reference.tensors)
        self._meet(reference)
        deadline = time.monotonic() + timeout_s

        def answer(future: Future[T]) -> T:
            if arrives(future, deadline - time.monotonic()):
                return future.result()
            raise DeadlineError(
                f"{_name(reference)} was not taken within {timeout_s:g} s: its worker did not "
                "answer in time"
            )

        peer, key = reference.peer, reference.key
        try:
            tensors: Tensors = answer(self._transport.fetch_handover(peer, key))
            answer(self._transport.call(peer, WorkerService.confirm_handover, key))
        except DeadlineError:
            self._leave(reference)
            raise
        except WorkerLost as error:
            self._leave(reference)
            raise _gone(reference, _ENDED) from error
        except WorkerError as error:
            raise _gone(reference, error.message) from error
        return Rollout(reference.header, tensors)

    def _meet(self, reference: RolloutReference) -> None:
        """Make its worker reachable from here."""
        run_id = identity().run_id
        if reference.run_id != run_id:
            raise ArgumentError(
                f"{reference} is of another run (this is {run_id!r}): rollouts are handed over "
                "between the trainers of one launch (run(main, num_trainers=...))"
            )
        if reference.contact is None:
            raise _gone(reference, _ENDED)
        if _is_own(reference):
            return
        slot = (reference.trainer, reference.worker_id)
        before = self._peers.get(slot, reference.peer)
        if before != reference.peer:
            self._transport.disconnect(before)
        self._peers[slot] = reference.peer
        self._transport.connect(reference.peer, reference.contact)

    def _leave(self, reference: RolloutReference) -> None:
        """What its worker still owes fails, and so nothing of it comes later."""
        if not _is_own(reference):
            self._transport.disconnect(reference.peer)


_ENDED = "its worker's process has ended, or can't be reached from here"


def _is_own(reference: RolloutReference) -> bool:
    return reference.trainer == identity().trainer


def _name(reference: RolloutReference) -> str:
    return (
        f"rollout {reference.header.sequence} of worker {reference.worker_id} of trainer "
        f"{reference.trainer}"
    )


def _gone(reference: RolloutReference, reason: str) -> RolloutGone:
    message = (
        f"its rollout {reference.header.sequence}, which trainer {reference.trainer} handed over, "
        f"is gone: {reason}"
    )
    return RolloutGone(message, worker_id=reference.worker_id)
