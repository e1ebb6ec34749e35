"""The decisions of the pool, and what it asks of workers.

Pure: no clock, no thread, no socket. :class:`~.pool.Pool` calls one method of :class:`PoolCore` for
each event. What that asks of a worker only sets something going: the answer, even if it comes at
once, is an event after the one that is handled now.

An event changes what is known of a worker (:mod:`.worker_slots`) or of a rollout
(:mod:`.requests`). After the events that are there one function, :meth:`PoolCore.decide`, looks at
the whole state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import ceil
from typing import Any

from distcollect.config import Staleness
from distcollect.errors import EnvError, is_server, slot_name
from distcollect.pool.first_failures import FirstFailures
from distcollect.pool.requests import Requests
from distcollect.pool.schedulers import scheduler_for
from distcollect.pool.setup_calls import SetupArguments, SetupCall, SetupCalls
from distcollect.pool.staleness import Pacer, SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    SlotState,
    Wanted,
    WorkerSlot,
    WorkerSlots,
)
from distcollect.rollout.layout import Tensors
from distcollect.roster.interfaces import FailureSink
from distcollect.telemetry.recorder import Activity, StatsRecorder
from distcollect.transport.protocol import Offer, Transport
from distcollect.transport.worker_service import WorkerService

# Rollouts that are fetched before the user asks for them: one is on its way while the user works
# on another. More would only make them older.
_PREFETCH = 2


class PoolCore:
    """Requests rollouts from workers, fetches them, and says when the user's batch is there.

    Attributes:
        closed: nothing is requested or delivered any more.
        wanted: what the user's thread waits for; None: nothing, or it is there.
        batch: what it waited for, until it takes it: rollouts in the order of their arrival.
        slots: the worker processes.
        versions: which weights were sent to which worker.
        requests: what was requested from them.
    """

    def __init__(
        self,
        plan: BatchPlan,
        staleness: Staleness | None,
        versions: SentVersions,
        transport: Transport,
        *,
        failure_sink: FailureSink,
        stats_recorder: StatsRecorder,
        post: Callable[..., None],
        clock: Callable[[], int],
        wake_user: Callable[[], None],
    ) -> None:
        """Start without workers.

        Args:
            plan: what is to be collected.
            staleness: which frames are too old, and what becomes of them.
            versions: which weights were sent to which worker; without any yet.
            transport: reaches the workers.
            failure_sink: is told of workers that failed, or that owe nothing more and may leave.
            stats_recorder: what to count in.
            post: has an event handled after this one: a function and its arguments.
            clock: gives nanoseconds.
            wake_user: wakes the user's threads: what they wait for may have come.
        """
        self._transport = transport
        self._failure_sink = failure_sink
        self._stats_recorder = stats_recorder
        self._post = post
        self._clock = clock
        self._wake_user = wake_user
        self.closed = False
        self.versions = versions
        self.slots = WorkerSlots(plan.reserved)
        # What is older is not delivered.
        self._bound = None if staleness is None or staleness.mode == "mask" else staleness
        self._pacer: Pacer | None = None
        if staleness is not None and staleness.mode == "pace" and not (plan.sync or plan.in_turn):
            self._pacer = Pacer(staleness, self.versions)
        self.requests = Requests(plan, self.slots, self.versions, pacer=self._pacer)
        self._scheduler = scheduler_for(self.requests, self._pacer)
        self.slots.may_ask = self._scheduler.may_ask
        self._plan = plan
        self._setup_calls = SetupCalls(self.slots, self._set_up)
        self._resumed_frames = 0
        self._is_closing = self._has_changed = False  # the second: there may be something to decide
        self._checked = 0  # the publications when rollouts were last checked for staleness
        # How many rollouts are fetched before the user asks for them. In async mode none before the
        # user has asked for the first one: it may be for another trainer.
        self._prefetch = plan.num_rollouts if plan.sync else 0
        self._ends_early = False  # workers that collect for this batch deliver what they have
        self.wanted: Wanted | None = None
        self.batch: Sequence[RolloutRequest] | None = None
        self._chosen: RolloutRequest | None = None  # the rollout of the next reference
        self._keep_s = 0.0
        self._activity: Activity | None = None
        self._first_failures = FirstFailures()

    # Events: workers come and go.

    def worker_joined(self, worker_id: int, incarnation: int, peer: int, newest: int) -> None:
        """A worker is there, and is sent version ``newest`` if that is not 0."""
        if newest:
            self.versions.publish(newest, [worker_id])
        slot = self.slots.add(worker_id, incarnation, peer, newest)
        self.requests.stale_frames.setdefault(worker_id, 0)
        self._setup_calls.joined(slot)
        self._wake_user()
        self._has_changed = True

    def worker_leaving(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: nothing more is requested from it."""
        slot = self.slots.find(worker_id, incarnation)
        if slot is not None and slot.is_staying:
            self.slots.become(slot, SlotState.LEAVING)
            self._setup_calls.gone(slot)
            self._wake_user()
            self._has_changed = True

    def worker_lost(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what it was to collect is requested from others."""
        slot = self.slots.remove(worker_id, incarnation, replaced=replaced)
        if slot is not None:
            self._setup_calls.gone(slot)
            self.requests.vacate(slot)
        self._wake_user()
        # Also if it is only certain now that there is no replacement: its share waited for that.
        self._has_changed = True

    # Events: weights.

    def published(self, version: int, worker_ids: Sequence[int]) -> None:
        """A new version goes to these workers. Nothing is requested before one of them has it."""
        self.versions.publish(version, worker_ids)
        if self._pacer is not None:
            self._pacer.published()
        self._refresh(worker_ids)

    def acknowledged(self, worker_id: int) -> None:
        """A worker has a newer version."""
        self._refresh([worker_id])
        self._wake_user()
        self._has_changed = True

    def has_weights(self, worker_id: int) -> bool:
        """Return True if its actions are chosen by weights that were sent, if any were."""
        holder = self.slots.get(self.versions.holder(worker_id))
        has = self.versions.acknowledged(worker_id)
        return holder is not None and has >= holder.first_version

    def resumed(self, version: int, frames: int) -> None:
        """The run goes on where another one was.

        Args:
            version: its policy_version.
            frames: the number of frames that it delivered; they count as requested.
        """
        # The state may be loaded again, if the first time failed.
        self.requests.frames_asked += frames - self._resumed_frames
        self._resumed_frames = frames
        self.versions.publish(version, self.slots.worker_ids)
        self._refresh(self.slots.worker_ids)

    def _refresh(self, worker_ids: Sequence[int]) -> None:
        for worker_id in worker_ids:
            if (slot := self.slots.get(worker_id)) is not None:
                self.slots.refresh(slot)

    # Events: setup calls.

    def setup_call_begun(self, method: Callable[..., Any], arguments: SetupArguments) -> SetupCall:
        """All workers are called, and those that join later when they do.

        What was collected before is given up, and what is being collected ends early.

        Raises:
            Exception: what ``arguments`` raises; then nothing has changed.
        """
        call = self._setup_calls.begin(method, arguments)
        self._give_up_all()
        if method is WorkerService.seed:
            for slot in self.slots:
                slot.turn = 0
        return call

    def _set_up(self, slot: WorkerSlot, method: Callable[..., Any], args: Sequence[Any]) -> None:
        self._when_answered(self.call(slot, method, *args), self._was_set_up, slot)

    def _was_set_up(self, slot: WorkerSlot, _: Any, error: BaseException | None) -> None:
        """A worker has answered a setup call; if by an error, it may be half set up."""
        self._setup_calls.answered(slot, error)
        self._wake_user()
        if error is not None:
            self.failed(slot, error)
        else:
            self._has_changed = True

    # What workers are asked, and the events of their answers.

    def call(
        self, slot: WorkerSlot, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method of a worker's service."""
        return self._transport.call(slot.peer, method, *args, **kwargs)

    def _when_answered(
        self, answer: Future[Any], event: Callable[[Any, Any, BaseException | None], None], of: Any
    ) -> None:
        """Call ``event`` with ``of``, and with the answer or the error, when it is there."""
        # Nothing here refers to ``answer``: only the garbage collector could free that cycle.
        answer.add_done_callback(partial(self._post, self._answered, event, of))

    def _answered(
        self,
        event: Callable[[Any, Any, BaseException | None], None],
        of: Any,
        answer: Future[Any],
    ) -> None:
        if not self.closed:
            error = answer.exception()
            event(of, None if error is not None else answer.result(), error)

    def _collect(self, request: RolloutRequest) -> None:
        request.asked_at = self._clock()
        deliver = partial(self._post, self._collected, request)
        self._transport.collect(request.slot.peer, request.wire_request, deliver)

    def _collected(
        self, request: RolloutRequest, offer: Offer, error: BaseException | None
    ) -> None:
        """A rollout lies on its worker."""
        if self.closed:
            return
        if error is not None:
            self.failed(request.slot, error)
            return
        if not request.slot.is_gone:
            self._stats_recorder.collected(offer.header, request.asked_at)
        self._first_failures.collected(request.worker_id)
        self.requests.offered(request, offer, self._clock())
        self._give_up_if_stale(request)
        self._setup_calls.go_on(request.slot)  # it may have waited for the end of the rollout
        if self._bound is None:
            self._fetch()  # mostly it is here at once, and all else is decided only once
        self._has_changed = True

    def _preempt(self) -> None:
        for request in self.requests.preempt_all():
            self.call(request.slot, WorkerService.preempt, request.number)

    def _give_up_all(self) -> None:
        """Deliver nothing that was requested until now; the workers are soon free again."""
        self._preempt()
        self.requests.give_up_all()

    def _move_here(self, request: RolloutRequest) -> None:
        request.asked_at = self._clock()
        self.requests.fetch(request).fetch(partial(self._post, self._fetched, request))

    def _fetched(
        self, request: RolloutRequest, tensors: Tensors, error: BaseException | None
    ) -> None:
        """A rollout is here, or can't be fetched."""
        if self.closed:
            return
        if error is not None:
            self.requests.not_fetched(request)
            self.failed(request.slot, error)
            return
        header, took_ns = request.known_header, self._clock() - request.asked_at
        self._stats_recorder.fetched(header.worker_id, header.num_bytes, took_ns)
        self.requests.fetched(request, tensors)
        self._give_up_if_stale(request)
        self._has_changed = True

    def _keep(self, request: RolloutRequest) -> None:
        self.requests.keep(request, secrets.token_hex(8))
        peer, key = request.slot.peer, request.key
        answer = self._transport.hand_over(peer, request.number, key, self._keep_s)
        self._when_answered(answer, self._kept, request)

    def _kept(self, request: RolloutRequest, held: Any, error: BaseException | None) -> None:
        """A worker keeps a rollout for another trainer, which fetches it by ``held``."""
        if error is not None:
            self._kept_no_longer(request, False, error)
            return
        outcome = self.call(request.slot, WorkerService.handover_outcome, request.key)
        self._when_answered(outcome, self._kept_no_longer, request)
        request.held, request.is_held = held, True
        if request is not self._chosen:
            self._take_back(request)  # the user waits for it no longer
        self._has_changed = True

    def _kept_no_longer(
        self, request: RolloutRequest, is_taken: bool, error: BaseException | None
    ) -> None:
        """Another trainer has taken a rollout, or no trainer will."""
        if error is not None:
            self.requests.keep_no_longer(request, "worker_lost")
            self.failed(request.slot, error)
        else:
            cause = "shut_down" if self._is_closing else "not_taken"
            self.requests.keep_no_longer(request, None if is_taken else cause)
            self._has_changed = True

    def _take_back(self, request: RolloutRequest) -> None:
        self.call(request.slot, WorkerService.cancel_handover, request.key)

    def failed(self, slot: WorkerSlot, error: BaseException) -> None:
        """A worker failed at what it was asked for.

        It is lost, or will be; what it owes is given up then.
        """
        if not slot.is_gone:
            slot.failed = True
            self.slots.leaving.discard(slot)  # it won't be let go, but lost
            self.slots.refresh(slot)
            collecting = {w for w in self.slots.worker_ids if not self.slots.is_reserved(w)}
            is_final = self._first_failures.is_final(slot, error, collecting)
            if isinstance(error, EnvError) and error.num_env_faults:
                key = slot.worker_id, slot.incarnation
                self.requests.ledger.env_failed(*key, error.num_env_faults)
                self._stats_recorder.env_failed(error.env_faults)
            self._failure_sink.report(slot.worker_id, slot.incarnation, error, is_final=is_final)
        self._has_changed = True

    # Events: what the user wants.

    def batch_wanted(self, wanted: Wanted, keep_s: float = 0.0) -> None:
        """The user waits for a batch.

        ``keep_s``: for how long a rollout's worker keeps it.
        """
        self.wanted = wanted
        self._keep_s = keep_s
        self._chosen = None
        self._activity = None
        self._ends_early = False
        self.requests.begin_batch()
        if self._pacer is not None:
            self._pacer.awaited()
        if wanted is Wanted.ALL:
            for slot in self.slots:  # each is to have a share
                self.slots.refresh(slot)
        else:
            self._prefetch = 0 if wanted is Wanted.REFERENCE else _PREFETCH
        self._has_changed = True

    def take_batch(self) -> Sequence[RolloutRequest] | None:
        """The user waits no longer, and gets the batch; None: it is not there."""
        batch, self.batch = self.batch, None
        if self.wanted is Wanted.ALL:
            # If it came later it would be older than the request for the next batch.
            self._give_up_all()
        self.wanted = self._chosen = None
        return batch

    def settle_delivered(self, requests: Sequence[RolloutRequest], cause: str | None) -> None:
        """The user has these rollouts, which were delivered; or they are lost by ``cause``.

        Those that are kept for other trainers have their own fate; a cause says that the user does
        not get the reference.
        """
        if self.closed:
            return  # they are lost with all others
        for request in requests:
            if request.state is RolloutState.DELIVERED:
                self.requests.settle_delivered(request, cause)
                continue
            # Nobody gets the reference to it, so that another one is to be collected.
            self.requests.ask_again()
            if request.state is RolloutState.KEPT:
                self._take_back(request)
        if cause is not None:
            self._has_changed = True

    def end_early(self) -> None:
        """Have the workers that collect for this batch, now or later, deliver what they have."""
        if not self._ends_early:
            self._ends_early = True
            self._preempt()

    # Events: the end.

    def closing(self) -> None:
        """Learn which of the rollouts that other trainers may still take were taken."""
        self._is_closing = True
        for request in self.requests.among[RolloutState.KEPT]:
            self._take_back(request)

    def close(self) -> None:
        """Nothing more is requested or delivered."""
        if not self.closed:
            self.closed = True
            self.requests.close()
            self._wake_user()

    # Decisions.

    def decide(self) -> None:
        """Look at the whole state after some events, and do all that is possible now."""
        if self.closed or not self._has_changed:
            return
        self._has_changed = False
        if self._bound is not None and self.wanted is not None:
            self._give_up_stale(self._bound)
        self._fetch()
        if self.wanted is Wanted.ALL:
            self._end_early_if_enough()
        self._ask()
        if self.wanted is not None and (batch := self._delivered(self.wanted)):
            self.batch = batch
            self.wanted = self._chosen = None
            self._fetch()
            self._ask()
        if self.slots.leaving:
            self._let_go()
        if self._is_closing and not self.requests.among[RolloutState.KEPT]:
            self._wake_user()
        if self.batch is not None:
            self._wake_user()  # at last: the user runs at once
        elif self.wanted is not None and (activity := self._waits_for()) != self._activity:
            self._activity = activity
            self._stats_recorder.switch_to(activity)

    def _give_up_stale(self, bound: Staleness) -> None:
        # Frames get older only when versions are sent.
        if self._checked != self.versions.generation:
            self._checked = self.versions.generation
            self.requests.give_up_stale(bound)

    def _give_up_if_stale(self, request: RolloutRequest) -> None:
        if self._bound is not None and self.requests.is_stale(request, self._bound):
            self.requests.give_up(request, "stale")

    def _fetch(self) -> None:
        """Fetch what there is room for, and what a worker would take along that is to leave."""
        requests = self.requests
        ready = requests.among[RolloutState.READY]
        while ready and requests.num_fetched < self._prefetch:
            self._move_here(next(iter(ready)))
        if self.slots.leaving and self._prefetch:
            for request in [request for request in ready if request.slot in self.slots.leaving]:
                self._move_here(request)

    def _let_go(self) -> None:
        """Say which of the workers that are to leave owe nothing any more."""
        for slot in [slot for slot in self.slots.leaving if not slot.owes_rollouts]:
            self.slots.leaving.remove(slot)
            self._failure_sink.drained(slot.worker_id, slot.incarnation)

    def _end_early_if_enough(self) -> None:
        share = self._plan.preemptive_threshold
        if share is not None:
            enough = max(1, ceil(share * self._plan.num_rollouts))
            if self.requests.num_waiting >= enough:
                self.end_early()

    def _ask(self) -> None:
        """Request rollouts from all workers that may be asked for one."""
        slots = self._scheduler.next_workers(is_awaited=self.wanted is not None)
        for request in [self.requests.request(slot) for slot in slots]:
            self._collect(request)
        if self._ends_early:
            self._preempt()

    def _delivered(self, wanted: Wanted) -> list[RolloutRequest]:
        """The rollouts that the user waits for, which are the user's now; empty: not there yet."""
        requests = self.requests
        here = requests.among[RolloutState.HERE]
        delivered: list[RolloutRequest] = []
        if wanted is Wanted.ALL:
            if len(here) >= self._plan.num_rollouts:
                delivered = list(here)
        elif wanted is Wanted.REFERENCE:
            if (chosen := self._to_refer()) is not None:
                delivered = [chosen]
        elif (chosen := self._scheduler.next_rollout()) is not None:
            if chosen.state is RolloutState.READY:
                self._move_here(chosen)
            elif chosen.state is RolloutState.HERE:
                delivered = [chosen]
        for request in delivered:
            requests.deliver(request)
        return delivered

    def _to_refer(self) -> RolloutRequest | None:
        """The rollout for another trainer, once its worker keeps it, which it is told to now.

        One that is here is handed over only if there is no other.
        """
        requests = self.requests
        if self._chosen is None or self._chosen.state is not RolloutState.KEPT:
            self._chosen = self._scheduler.first_of(requests.among[RolloutState.READY])
            if self._chosen is not None:
                self._keep(self._chosen)
        if self._chosen is not None:
            return self._chosen if self._chosen.is_held else None
        here = requests.among[RolloutState.HERE]
        return None if requests.num_collecting else self._scheduler.first_of(here)

    # What the user waits for, in words.

    def _waits_for(self) -> Activity:
        is_collecting = self.requests.num_collecting > 0
        # In async mode the first rollout that arrives will do.
        if self.requests.among[RolloutState.FETCHING] and not (self._plan.sync and is_collecting):
            return "transfer"
        return "collect" if is_collecting or not any(self._behind) else "weights"

    @property
    def _behind(self) -> Iterator[WorkerSlot]:
        """The workers that collect, and don't have the newest weights sent to them."""
        return (s for s in self.slots.line if not self.versions.is_up_to_date(s.worker_id))

    def _is_outdated(self, slot: WorkerSlot) -> bool:
        worker_id, bound = slot.worker_id, self._bound
        version = self.versions.acknowledged(worker_id)
        return bound is not None and self.versions.slack(bound, worker_id, version) < 0

    @property
    def awaited(self) -> tuple[str, list[int]]:
        """The workers that the user waits for, in words; and those of them that collect."""
        # Their frames would be too old: with mode "pace" they are asked for nothing.
        outdated = sorted(slot.worker_id for slot in self.slots.line if self._is_outdated(slot))
        owing = (slot.worker_id for slot in self.slots.line if slot.owes_rollouts)
        late = sorted({*owing}.difference(outdated))
        behind = sorted(slot.worker_id for slot in self._behind if not slot.owes_rollouts)
        coming = sorted(w for w in self.slots.coming if not is_server(w))
        servers = [slot_name(w) for w in sorted(self.slots.coming) if is_server(w)]
        parts = []
        if outdated and not late:
            parts.append(
                f"newer weights for workers {outdated} (theirs are older than {self._bound})"
            )
        if late or not (behind or coming or outdated):
            parts.append(f"workers {late}")
        if behind and (self._plan.sync or not late):
            parts.append(f"workers {behind} to acknowledge the newest weights sent to them")
        if num_kept := len(self.requests.among[RolloutState.KEPT]):
            parts.append(f"other trainers to take {num_kept} rollout(s)")
        if coming:
            parts.append(f"workers {coming} to be replaced")
        if servers:
            parts.append(f"{', '.join(servers)} to be replaced")
        return " and for ".join(parts), late
