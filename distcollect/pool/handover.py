"""Rollouts that one trainer of a run hands over to another, straight from their worker."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distcollect.common.peer_ids import identity
from distcollect.common.waiting import arrives
from distcollect.errors import ArgumentError, DeadlineError, RolloutGone, WorkerError, WorkerLost
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout, Tensors
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerService

T = TypeVar("T")

# So many rollouts that came with their reference are not given twice.
_REMEMBERED = 4096


@dataclass(frozen=True)
class RolloutReference:
    """A rollout that another trainer can take from its worker; small, and made to be pickled.

    Use its properties; the attributes below are for :meth:`RPCDataCollector.take_over`.

    Attributes:
        trainer: which of the run's trainers handed it over.
        run_id: the run's id.
        header: of the rollout.
        layout: of its frames.
        peer: its worker's id on the wire.
        contact: how to reach the worker; None: it is gone.
        key: a secret that gives access to the rollout; no other one has it.
        held: by which the worker gives it: over RPC, an RRef that the worker owns; over TCP, None.
        tensors: the rollout itself, if it had been fetched before it was handed over.
    """

    trainer: int
    run_id: str
    header: Header
    layout: Layout = field(repr=False)
    peer: int = field(repr=False)
    contact: Any = field(repr=False)
    key: str = field(repr=False)
    held: Any = field(repr=False)
    tensors: Tensors | None = field(default=None, repr=False)

    @property
    def worker_id(self) -> int:
        """The worker that collected it, by its id with the trainer that handed it over."""
        return self.header.worker_id

    @property
    def num_frames(self) -> int:
        """Frames in it."""
        return self.header.num_frames

    @property
    def policy_version(self) -> tuple[int, int]:
        """The lowest and the highest policy_version of its frames."""
        return self.header.policy_version

    @property
    def num_bytes(self) -> int:
        """Size of its tensors, in bytes."""
        return self.header.num_bytes


class HandoverReceiver:
    """Fetches rollouts that other trainers handed over, from their workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        # (trainer, worker_id) to the peer of the process that is reachable. An earlier process of
        # that worker is evicted: its connection may hold memory.
        self._peers: dict[tuple[int, int], int] = {}
        # Keys of those that came with their reference.
        self._taken: deque[str] = deque(maxlen=_REMEMBERED)

    def take(self, reference: RolloutReference, timeout_s: float) -> Rollout:
        """Fetch a rollout.

        Raises:
            ArgumentError: it is of another run.
            RolloutGone: it is not there any more; names the worker, and says why.
            DeadlineError: the worker did not answer in time; names it.
        """
        if reference.tensors is not None:
            if reference.key in self._taken:
                raise _gone(reference, "it was taken already")
            self._taken.append(reference.key)
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
            tensors: Tensors = answer(self._transport.fetch_handover(peer, key, reference.held))
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
        """Make its worker reachable from this process."""
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
        """Forget its worker, so that no answer of it comes later."""
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
