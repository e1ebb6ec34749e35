"""The decisions of the pool: each event becomes a list of commands.

Pure: no clock, no thread, no socket. :class:`~.pool.Pool` calls one method of :class:`PoolCore` for
each event and then executes the commands. Answers of workers come back as further events.

What an event costs does not depend on the number of workers, but for a publication (which concerns
all the workers that it is sent to) and what concerns all requests at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distcollect.config import Staleness
from distcollect.errors import WorkerLost
from distcollect.pool.first_failures import FirstFailures
from distcollect.pool.modes import make_scheduler
from distcollect.pool.pool_commands import (
    AwaitTaken,
    Collect,
    Command,
    Deliver,
    NoteActivity,
    ReportFailure,
    TakeBack,
    WakeUser,
    Wanted,
)
from distcollect.pool.requests import Requests
from distcollect.pool.setup_calls import SetupArguments, SetupCall, SetupCalls
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    SlotState,
    WorkerSlot,
    WorkerSlots,
)
from distcollect.rollout.layout import Tensors
from distcollect.telemetry.recorder import Activity
from distcollect.transport.protocol import Offer

# Rollouts that are fetched before the user asks for them: one is on its way while the user works on
# another. More would only make them older.
_PREFETCH = 2


class PoolCore:
    """Requests rollouts from workers, fetches them, and says when the user's batch is there.

    Attributes:
        commands: what is to be done, in this order; whoever does it removes it.
        closed: events are ignored, but for the accounts of processes that ended.
        wanted: what the user's thread waits for.
        slots: the worker processes.
        versions: which weights were sent to which worker.
        requests: what was requested from them.
    """

    def __init__(
        self, plan: BatchPlan, staleness: Staleness | None, make_key: Callable[[], str]
    ) -> None:
        """Start without workers.

        Args:
            plan: what is to be collected.
            staleness: which frames are too old, and what becomes of them.
            make_key: makes keys for rollouts that other trainers may take; no two are the same.
        """
        self.commands: deque[Command] = deque()
        self.closed = False
        self.versions = SentVersions()
        self.slots = WorkerSlots(self.versions, plan.reserved)
        drops = staleness is not None and staleness.mode != "mask"
        max_lag = staleness.max_policy_lag if staleness is not None and drops else None
        self._drops_stale = max_lag is not None
        self._limits_lag = plan.sync or staleness is not None
        self._scheduler = make_scheduler(plan, staleness, self.slots, self.versions)
        self.requests = Requests(
            plan,
            self.slots,
            self._scheduler,
            self.versions,
            self.commands.append,
            max_lag=max_lag,
        )
        self._plan = plan
        self._make_key = make_key
        self._setup_calls = SetupCalls(self.commands.append)
        self._resumed_frames = 0
        self._is_closing = False
        # How many of the rollouts that arrived first are fetched. In async mode none before the
        # user has asked for the first one: it may be for another trainer.
        self._max_fetched = plan.num_rollouts if plan.sync else 0
        self._refers = False  # the user wants references, so that nothing is fetched
        self.wanted: Wanted | None = None
        self._chosen: RolloutRequest | None = None  # the rollout of the next reference
        self._keep_s = 0.0
        self._activity: Activity | None = None
        self._untaken = "not_taken"  # the cause for a rollout that no trainer took
        self._first_failures = FirstFailures()

    @property
    def stamp(self) -> object:
        """Changes with all that decides whether a rollout may still be delivered."""
        return self.versions.revision if self._limits_lag else 0, self._setup_calls.num_begun

    # Events: workers come and go.

    def worker_joined(
        self, worker_id: int, incarnation: int, peer: int, newest: int, acknowledged: int
    ) -> None:
        """A worker is there. It has version ``acknowledged``, and is sent ``newest`` if not 0."""
        if newest:
            self.versions.publish(newest, [worker_id])
        slot = self.slots.add(worker_id, incarnation, peer, acknowledged)
        self.requests.stale_frames.setdefault(worker_id, 0)
        self._setup_calls.joined(slot)
        self._note_serving(slot)
        self._scheduler.joined(slot)
        self._advance()

    def worker_leaving(self, worker_id: int, incarnation: int) -> None:
        """A worker is to leave: nothing more is requested from it."""
        slot = self.slots.find(worker_id, incarnation)
        if slot is None:
            return
        if slot.is_staying:
            slot.become(SlotState.LEAVING)
            self._forget_setup(slot)
            self._scheduler.leaves(slot)
        self._give_up_stale()
        self._fetch_from(slot)
        self.requests.check_drained(slot)
        self._advance()

    def worker_lost(self, worker_id: int, incarnation: int, *, replaced: bool) -> None:
        """A worker is gone; what it was to collect is requested from others."""
        slot = self.slots.remove(worker_id, incarnation, replaced=replaced)
        if slot is not None:
            self._forget_setup(slot)
            self.requests.vacate(slot)
            self._scheduler.leaves(slot)
            self._fetch_ahead()
        # Also if it is only certain now that there is no replacement: its share waited for that.
        self._advance()

    # Events: weights.

    def published(self, version: int, worker_ids: Sequence[int]) -> None:
        """A new version goes to these workers."""
        self.versions.publish(version, worker_ids)
        self._scheduler.published()
        for worker_id in worker_ids:
            self._compare_versions(self.slots.get(worker_id))

    def acknowledged(self, worker_id: int, version: int) -> None:
        """A worker has this version."""
        slot = self.slots.get(worker_id)
        if slot is not None:
            slot.acknowledged = version
            self._compare_versions(slot)
        self._advance()

    def resumed(self, version: int, frames: int, acknowledged: Mapping[int, int]) -> None:
        """The run goes on where another one was.

        Args:
            version: its policy_version.
            frames: the number of frames that it delivered; they count as requested.
            acknowledged: maps worker_id to the version that the worker has by the new numbers. It
                is below ``version`` for a worker that still waits for its weights.
        """
        # The state may be loaded again, if the first time was interrupted.
        self._scheduler.frames_asked += frames - self._resumed_frames
        self._resumed_frames = frames
        self.versions.publish(version, self.slots.worker_ids)
        for slot in self.slots:
            slot.acknowledged = acknowledged[slot.worker_id]
            self._compare_versions(slot)

    def _compare_versions(self, slot: WorkerSlot | None) -> None:
        if slot is not None:
            self.slots.compare_versions(slot)
            self._scheduler.refresh(slot)

    # Events: setup calls.

    def setup_call_begun(self, method: Callable[..., Any], arguments: SetupArguments) -> SetupCall:
        """All workers are called, and those that join later when they do.

        What was collected before is given up, and what is being collected ends early.

        Raises:
            Exception: what ``arguments`` raises; then nothing has changed.
        """
        call = self._setup_calls.begin(method, arguments, self.slots)
        self.requests.preempt_all()
        self.requests.give_up_all()
        for slot in self.slots:
            self._scheduler.refresh(slot)
        return call

    def set_up(self, slot: WorkerSlot) -> None:
        """A worker has answered a setup call."""
        if self._setup_calls.answered(slot):
            self.commands.append(WakeUser())
        self._note_serving(slot)
        self._scheduler.refresh(slot)
        self._advance()

    def _note_serving(self, slot: WorkerSlot) -> None:
        if slot.state is SlotState.SERVING:
            self.commands.append(WakeUser())  # it may need a worker, whichever comes

    def not_set_up(self, slot: WorkerSlot, error: BaseException) -> None:
        """A worker failed at a setup call: it may be half set up, and is replaced."""
        if self._setup_calls.answered(slot, error):
            self.commands.append(WakeUser())
        self._failed(slot, error)

    def _forget_setup(self, slot: WorkerSlot) -> None:
        if self._setup_calls.gone(slot):
            self.commands.append(WakeUser())

    # Events: answers about rollouts.

    def offered(self, request: RolloutRequest, offer: Offer, now: int) -> None:
        """A rollout lies on its worker since ``now``, in nanoseconds."""
        self._first_failures.collected(request.slot.worker_id)
        is_wanted = self.requests.offered(request, offer, now)
        self._setup_calls.go_on(request.slot)  # it may have waited for the end of the rollout
        if is_wanted:
            if self._drops_stale:
                self._give_up_stale()
            if self._plan.sync or len(self.requests.arrived) <= self._max_fetched:
                self.requests.fetch(request)
            else:
                self._fetch_from(request.slot)
            enough = self._scheduler.enough_to_end_early
            if enough is not None and len(self.requests.arrived) >= enough:
                self.end_early()
        self._advance()

    def not_collected(self, request: RolloutRequest, error: BaseException) -> None:
        """A worker failed to collect a rollout."""
        self._failed(request.slot, error)

    def fetched(self, request: RolloutRequest, tensors: Tensors) -> None:
        """A rollout is here."""
        self.requests.fetched(request, tensors)
        self._advance()

    def not_fetched(self, request: RolloutRequest, error: BaseException) -> None:
        """A rollout can't be fetched."""
        self.requests.not_fetched(request)
        self._fetch_ahead()
        self._failed(request.slot, error)

    def kept(self, request: RolloutRequest, held: Any) -> None:
        """A worker keeps a rollout for another trainer, which fetches it by ``held``."""
        request.held = held
        request.become(RolloutState.KEPT)
        self.commands.append(AwaitTaken(request))
        self._advance()

    def taken(self, request: RolloutRequest, *, is_taken: bool) -> None:
        """Another trainer has taken a rollout, or no trainer will."""
        self.requests.keep_no_longer(request, None if is_taken else self._untaken)
        self._advance()

    def not_kept(self, request: RolloutRequest, error: BaseException) -> None:
        """A worker can't keep a rollout any more."""
        self.requests.keep_no_longer(request, "worker_lost")
        self._failed(request.slot, error)

    def unreachable(self, slot: WorkerSlot, error: BaseException) -> None:
        """A call to a worker was interrupted, so that its answer may never be seen."""
        self._failed(slot, WorkerLost(f"a call to it was interrupted by {error!r}"))

    def _failed(self, slot: WorkerSlot, error: BaseException) -> None:
        if not slot.is_gone:
            # It is lost, or will be: what it owes is given up then.
            collecting = set(self.slots.worker_ids) - self._plan.reserved
            is_final = self._first_failures.is_final(slot, error, collecting)
            self.commands.append(ReportFailure(slot, error, is_final))
        self._advance()

    # Events: what the user wants.

    def batch_wanted(self, wanted: Wanted, keep_s: float = 0.0) -> None:
        """The user waits for a batch.

        ``keep_s``: for how long a rollout's worker keeps it.
        """
        self.wanted = wanted
        self._keep_s = keep_s
        self._chosen = None
        self._activity = None
        self._scheduler.begin()
        if wanted is not Wanted.ALL:
            referred, self._refers = self._refers, wanted is Wanted.REFERENCE
            max_fetched, self._max_fetched = self._max_fetched, 0 if self._refers else _PREFETCH
            if self._max_fetched > max_fetched:
                self._fetch_ahead()
            if referred and not self._refers:
                for slot in self.slots:
                    self._fetch_from(slot)
        self._advance()

    def batch_cancelled(self) -> None:
        """The user waits no longer, though the batch is not there."""
        if self.wanted is Wanted.ALL:
            # If it came later it would be older than the request for the next batch.
            self.requests.give_up_all()
        self._scheduler.end()
        self.wanted = self._chosen = None

    def may_deliver_again(self, requests: Sequence[RolloutRequest], wanted: Wanted) -> bool:
        """Whether rollouts that were delivered, but did not reach the user, may be given again.

        They must be what the user would get now: not from before a seed, and no older than the
        weights that were sent since then allow.
        """
        is_reference = any(request.state is RolloutState.REFERRED for request in requests)
        if is_reference != (wanted is Wanted.REFERENCE):
            return False
        return all(self.requests.may_deliver_again(request) for request in requests)

    def take_back(self, requests: Sequence[RolloutRequest], cause: str) -> None:
        """Rollouts that were delivered did not reach the user, and are lost by ``cause``.

        Of those that are kept for other trainers, the references did not reach the user.
        """
        for request in requests:
            if request.state is RolloutState.DELIVERED:
                self.requests.take_back(request, cause)
            elif request.state is RolloutState.REFERRED:
                self._scheduler.taken_back()
                self.commands.append(TakeBack(request))
            elif request.state is RolloutState.GIVEN_UP:
                # Its worker was lost, or kept it no longer, while nobody had the reference.
                self._scheduler.taken_back()

    def end_early(self) -> None:
        """Have the workers that collect for this batch, now or later, deliver what they have."""
        if not self._scheduler.ends_early:
            self._scheduler.ends_early = True
            self.requests.preempt_all()

    # Events: the end.

    def closing(self) -> None:
        """Learn which of the rollouts that other trainers may still take were taken."""
        self._is_closing = True
        self._untaken = "shut_down"
        self.commands.extend(TakeBack(request) for request in self.requests.kept)

    def close(self) -> None:
        """Nothing more is requested or delivered."""
        if not self.closed:
            self.closed = True
            self.requests.close()
            self.commands.append(WakeUser())

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """A process is gone for ``cause`` and had stepped this many frames; None: not known."""
        self.requests.account(worker_id, incarnation, cause, stepped)

    # Decisions.

    def _advance(self) -> None:
        """Do what an event has made possible."""
        self._ask()
        if self._is_closing and not self.requests.kept:
            self.commands.append(WakeUser())
        if self.wanted is None:
            return
        if self._is_there():
            self._deliver()
        elif (activity := self._waits_for()) != self._activity:
            self._activity = activity
            self.commands.append(NoteActivity(activity))

    def _deliver(self) -> None:
        """What the user waits for is there: the user has it, and waits no longer."""
        wanted, self.wanted = self.wanted, None
        assert wanted is not None
        if wanted is Wanted.ALL:
            requests = self.requests.deliver_all()
        else:
            requests = [self._delivered()]
            if wanted is Wanted.NEXT:
                self._fetch_ahead()
            self._ask()
        # At last: the user's thread runs at once.
        self.commands.append(Deliver(wanted, requests))

    def _delivered(self) -> RolloutRequest:
        """The chosen rollout, or the reference to it, is the user's now."""
        chosen, self._chosen = self._chosen, None
        assert chosen is not None
        self._scheduler.end()
        if chosen.state is RolloutState.HERE:
            self.requests.deliver(chosen)
        else:
            chosen.become(RolloutState.REFERRED)
        self._scheduler.delivered(chosen)
        return chosen

    def _ask(self) -> None:
        """Request rollouts from all workers that may be asked for one."""
        scheduler = self._scheduler
        if self.closed or (slot := scheduler.next_slot()) is None:
            return
        requests = []
        while slot is not None:
            requests.append(self.requests.request(slot))
            slot = scheduler.next_slot()
        self.commands.append(Collect(requests))
        if scheduler.ends_early:
            self.requests.preempt_all()

    def _give_up_stale(self) -> None:
        if self.requests.give_up_stale():
            self._fetch_ahead()
            self._ask()

    def _fetch_ahead(self) -> None:
        """Fetch what there is room for, as some do not wait any more."""
        if not self._plan.sync:  # else all are fetched when they arrive
            for request in self.requests.arrived.first(self._max_fetched):
                self.requests.fetch(request)

    def _fetch_from(self, slot: WorkerSlot) -> None:
        """Fetch what a worker would take along that is to leave."""
        if slot.state is SlotState.LEAVING and not self._refers:
            for request in list(slot.arrived):
                self.requests.fetch(request)

    def _is_there(self) -> bool:
        """Whether what the user waits for is there."""
        if self._drops_stale and self.wanted is not Wanted.REFERENCE:
            self._give_up_stale()
        if self.wanted is Wanted.ALL:
            return self.requests.arrived.num_here == self._plan.num_rollouts
        if self.wanted is Wanted.NEXT:
            self._chosen = self._scheduler.choose()
            if self._chosen is None:
                return False
            self.requests.fetch(self._chosen)
            return self._chosen.state is RolloutState.HERE
        return self._has_reference()

    def _has_reference(self) -> bool:
        """Whether a rollout can be handed over; if none is kept yet, have a worker keep one."""
        chosen = self._chosen
        if chosen is None or chosen.state not in (RolloutState.KEEPING, RolloutState.KEPT):
            if self._drops_stale:
                self._give_up_stale()
            self._chosen = chosen = self._next_to_refer()
            if chosen is not None and chosen.state is RolloutState.READY:
                self.requests.keep(chosen, self._make_key(), self._keep_s)
        return chosen is not None and chosen.state in (RolloutState.KEPT, RolloutState.HERE)

    def _next_to_refer(self) -> RolloutRequest | None:
        """The next rollout for another trainer; one that is here only if there is no other."""
        arrived = self.requests.arrived
        ready = arrived.first_ready()
        if ready is not None:
            return self._scheduler.choose_to_refer() or ready
        if self.slots.num_collecting or not arrived.num_here:
            return None
        return self._scheduler.choose_among(arrived.all_here())

    # What the user waits for, in words.

    def _waits_for(self) -> Activity:
        is_collecting = self.slots.num_collecting > 0
        # In async mode the first rollout that arrives will do.
        if self.requests.arrived.num_fetching and not (self._plan.sync and is_collecting):
            return "transfer"
        return "weights" if self.slots.behind and not is_collecting else "collect"

    @property
    def awaited(self) -> str:
        """The workers that the user waits for, in words."""
        slots = sorted(self.slots.able, key=lambda slot: slot.worker_id)
        late = [slot.worker_id for slot in slots if slot.unsettled]
        behind = [s.worker_id for s in slots if not s.unsettled and not s.is_up_to_date]
        coming = sorted(self.slots.coming)
        parts = []
        if late or not (behind or coming):
            parts.append(f"workers {late}")
        if behind and (self._plan.sync or not late):
            parts.append(f"workers {behind} to acknowledge the newest weights sent to them")
        if kept := self.requests.kept:
            parts.append(f"other trainers to take {len(kept)} rollout(s)")
        if coming:
            parts.append(f"workers {coming} to be replaced")
        return " and for ".join(parts)
