"""What was requested from workers, and what became of it: delivered, or given up and why.

Pure bookkeeping, with the ledger that comes of it. What is to be done for it goes into a list of
commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from distcollect.pool.arrived_rollouts import ArrivedRollouts
from distcollect.pool.ledger import Ledger
from distcollect.pool.pool_commands import Command, Decline, Fetch, Keep, Preempt, ReportDrained
from distcollect.pool.scheduler import Scheduler
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import (
    BatchPlan,
    RolloutRequest,
    RolloutState,
    SlotState,
    WorkerSlot,
    WorkerSlots,
)
from distcollect.results import LedgerReport, WorkerThroughput
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import CollectRequest, Offer

_NONE_LOST: Mapping[str, int] = {}


@dataclass(slots=True)
class _Throughput:
    """How fast a worker is, see :class:`~distcollect.results.WorkerThroughput`."""

    num_rollouts: int = 0
    mean_s: float = 0.0
    num_preempted: int = 0


class Requests:
    """Every rollout that was requested, until it is settled; that is once, and in the ledger.

    Attributes:
        arrived: the rollouts that wait for delivery.
        kept: those that other trainers may still take.
        stale_frames: frames that were given up as too stale, by worker_id.
    """

    def __init__(
        self,
        plan: BatchPlan,
        slots: WorkerSlots,
        scheduler: Scheduler,
        versions: SentVersions,
        commands: Callable[[Command], None],
        *,
        max_lag: int | None,
    ) -> None:
        """Start without any request.

        Args:
            plan: what a rollout is.
            slots: the workers.
            scheduler: is told what it has to know for its decisions.
            versions: which weights were sent to which worker.
            commands: called with each command.
            max_lag: rollouts that lag more are given up; None: none are for that.
        """
        self.arrived = ArrivedRollouts()
        self.kept: dict[RolloutRequest, None] = {}
        self.stale_frames: dict[int, int] = {}
        self._plan = plan
        self._slots = slots
        self._scheduler = scheduler
        self._versions = versions
        self._commands = commands
        self._max_lag = max_lag
        self._ledger = Ledger()
        self._throughput: dict[int, _Throughput] = {}
        # (worker_id, incarnation) of a process that is gone: frames of its unanswered requests.
        self._unaccounted: dict[tuple[int, int], int] = {}
        self._last_sent: CollectRequest | None = None
        self._epoch = 0  # how often all requests were given up
        self._collecting: dict[RolloutRequest, None] = {}  # for this batch, and not preempted
        # Rollouts whose lag was not looked at since they arrived, and the version of that look.
        self._unchecked: list[RolloutRequest] = []
        self._checked_revision = 0

    @property
    def ledger(self) -> LedgerReport:
        """Where all frames went."""
        return self._ledger.report()

    def ledger_without(self, on_their_way: Iterable[RolloutRequest]) -> LedgerReport:
        """Where all frames went, if the user does not have these delivered rollouts yet."""
        return self._ledger.report(
            (request.slot.worker_id, request.known_header.num_frames)
            for request in on_their_way
            if request.state is RolloutState.DELIVERED
        )

    @property
    def paces(self) -> dict[int, WorkerThroughput]:
        """How fast each worker is, by worker_id."""
        return {
            worker_id: WorkerThroughput(pace.num_rollouts, pace.mean_s, pace.num_preempted)
            for worker_id, pace in sorted(self._throughput.items())
        }

    @property
    def num_ready(self) -> dict[int, int]:
        """worker_id to how many of its rollouts wait for delivery; without those that have none."""
        return dict(Counter(request.slot.worker_id for request in self.arrived))

    def is_current(self, request: RolloutRequest) -> bool:
        """Whether it was made after all requests were given up last."""
        return request.epoch == self._epoch

    # From the request to the rollout.

    def request(self, slot: WorkerSlot) -> RolloutRequest:
        """A worker's next rollout is requested."""
        random = self._scheduler.frames_asked < self._plan.random_frames
        number, slot.num_requests = slot.num_requests, slot.num_requests + 1
        version = slot.acknowledged
        wire_request = self._wire_form(version, random=random)
        request = RolloutRequest(slot.worker_id, version, slot, number, self._epoch, wire_request)
        self._scheduler.requested(request)
        self._slots.begin_collecting(request)
        slot.unsettled.add(number)
        slot.open.add(request)
        self._collecting[request] = None
        self._scheduler.refresh(slot)
        return request

    def _wire_form(self, version: int, *, random: bool) -> CollectRequest:
        """What is sent to a worker; most requests in a row are equal, and share one."""
        last = self._last_sent
        if last is None or last.version != version or last.random != random:
            plan = self._plan
            last = CollectRequest(plan.num_steps, random=random, fresh=plan.sync, version=version)
            self._last_sent = last
        return last

    def preempt_all(self) -> None:
        """End the rollouts that are still collected for this batch."""
        for request in self._collecting:
            request.become(RolloutState.PREEMPTED)
            self._commands(Preempt(request))
        self._collecting.clear()

    def offered(self, request: RolloutRequest, offer: Offer, now: int) -> bool:
        """It lies on its worker; returns whether it waits for delivery now."""
        slot, header = request.slot, offer.header
        self._slots.end_collecting(slot)
        self._collecting.pop(request, None)
        if slot.state is SlotState.GONE:
            self._commands(Decline(offer))  # it was given up when its worker was lost
            return False
        self._ledger.announce(
            slot.worker_id,
            slot.incarnation,
            header.sequence,
            header.num_frames,
            stepped=header.stepped,
            lost=dict(header.lost) if header.lost else _NONE_LOST,
            env_faults=header.env_faults,
        )
        request.header, request.offer = header, offer
        throughput = self._throughput.get(slot.worker_id)
        if throughput is None:
            throughput = self._throughput[slot.worker_id] = _Throughput()
        throughput.num_rollouts += 1
        took_s = (now - request.asked_at) / 1e9
        throughput.mean_s += (took_s - throughput.mean_s) / throughput.num_rollouts
        throughput.num_preempted += request.state is RolloutState.PREEMPTED
        request.become(RolloutState.READY)
        lowest, _ = header.policy_version
        self._scheduler.offered(request, lowest)
        if not self.is_current(request):
            self._give_up(request, "given_up")
            return False
        self.arrived.add(request)
        if self._max_lag is not None:
            self._unchecked.append(request)
        self._scheduler.arrived(request)
        return True

    def env_failed(self, slot: WorkerSlot, env_faults: int) -> None:
        """An env of a worker raised too often, after ``env_faults`` faults in all."""
        self._ledger.env_failed(slot.worker_id, slot.incarnation, env_faults)

    def fetch(self, request: RolloutRequest) -> None:
        """It is moved here, unless it is here, on its way or unreachable."""
        if request.state is RolloutState.READY:
            assert request.offer is not None
            self.arrived.fetching(request)
            self._commands(Fetch(request, request.offer))

    def fetched(self, request: RolloutRequest, tensors: Tensors) -> None:
        """It is here."""
        if request not in self.arrived:
            self._give_up(request, "given_up")  # as all requests of its time
            return
        self.arrived.here(request)
        request.tensors, request.offer = tensors, None
        if self._max_lag is not None:
            self._unchecked.append(request)
        self._scheduler.fetched(request)
        self._settle(request)

    def not_fetched(self, request: RolloutRequest) -> None:
        """It can't be fetched; it is given up when its worker is lost."""
        if request.slot.is_gone:
            self._discard(request)
            self._give_up(request, "worker_lost")
        elif request in self.arrived:
            self.arrived.unreachable(request)
        else:
            request.become(RolloutState.UNREACHABLE)

    # The end of a request.

    def deliver(self, request: RolloutRequest) -> None:
        """The user gets it."""
        self.arrived.remove(request)
        self._delivered(request)

    def deliver_all(self) -> list[RolloutRequest]:
        """The user gets all that are here, which are all that arrived."""
        requests = self.arrived.take_all()
        for request in requests:
            self._delivered(request)
        return requests

    def _delivered(self, request: RolloutRequest) -> None:
        request.become(RolloutState.DELIVERED)
        self._ledger.deliver(*origin(request.known_header))
        self._scheduler.removed(request)

    def may_deliver_again(self, request: RolloutRequest) -> bool:
        """Whether one that was delivered, but did not reach the user, is still what it wants."""
        max_lag = 0 if self._plan.sync else self._max_lag
        lag = self._versions.lag(request.worker_id, request.version)
        return self.is_current(request) and (max_lag is None or lag <= max_lag)

    def take_back(self, request: RolloutRequest, cause: str) -> None:
        """One that was delivered did not reach the user; it is lost by ``cause``."""
        header = request.known_header
        request.become(RolloutState.GIVEN_UP)
        self._ledger.take_back(*origin(header), header.num_frames)
        self._ledger.lose(*origin(header), cause)
        self._scheduler.taken_back()

    def keep(self, request: RolloutRequest, key: str, keep_s: float) -> None:
        """Its worker is to keep it for whichever trainer shows this key."""
        assert request.offer is not None
        request.key = key
        self._discard(request)
        request.become(RolloutState.KEEPING)
        self.kept[request] = None
        self._commands(Decline(request.offer))
        self._commands(Keep(request, keep_s))
        self._scheduler.refresh(request.slot)

    def keep_no_longer(self, request: RolloutRequest, cause: str | None) -> None:
        """Another trainer has it, or it is lost for ``cause``."""
        del self.kept[request]
        slot, header = request.slot, request.known_header
        # Without a reference no trainer gets it, so that another one is to be collected.
        counts = request.state is RolloutState.REFERRED
        if cause is None:
            request.become(RolloutState.DELIVERED)
            self._ledger.deliver(*origin(header))
        else:
            request.become(RolloutState.GIVEN_UP)
            self._ledger.lose(*origin(header), cause)
        if not counts:
            self._scheduler.given_up(request, is_wanted=True)
        slot.open.discard(request)
        if cause != "worker_lost":  # else its memory can't be used again
            slot.unsettled.discard(request.number)
        self._scheduler.refresh(slot)
        self.check_drained(slot)

    def give_up_stale(self) -> bool:
        """Give up what is too stale to be delivered; returns whether there was any."""
        if self._max_lag is None:
            return False
        # Lags grow only when versions are sent.
        unchecked, self._unchecked = self._unchecked, []
        if self._checked_revision != self._versions.revision:
            self._checked_revision = self._versions.revision
            unchecked = self.arrived.first(len(self.arrived))
        stale = [request for request in unchecked if self._is_stale(request, self._max_lag)]
        for request in stale:
            self.stale_frames[request.slot.worker_id] += request.known_header.num_frames
            self._discard(request)
            self._give_up(request, "stale")
        return bool(stale)

    def _is_stale(self, request: RolloutRequest, max_lag: int) -> bool:
        # One that is being fetched is looked at again when it is here.
        if request not in self.arrived or request.state is RolloutState.FETCHING:
            return False
        return self._versions.lag(request.worker_id, request.version) > max_lag

    def give_up_all(self) -> None:
        """Deliver nothing that was requested until now."""
        self._epoch += 1
        self._collecting.clear()
        self._scheduler.given_up_all()
        for request in self.arrived.first(len(self.arrived)):
            self._discard(request)
            # One that is being fetched is given up when it is here.
            if request.state is not RolloutState.FETCHING:
                self._give_up(request, "given_up")

    def _give_up(self, request: RolloutRequest, cause: str) -> None:
        request.become(RolloutState.GIVEN_UP)
        if request.header is not None:
            self._ledger.lose(*origin(request.header), cause)
        if request.offer is not None:
            self._commands(Decline(request.offer))
        request.offer = request.tensors = None
        self._scheduler.given_up(request, is_wanted=self.is_current(request))
        self._settle(request)

    def _discard(self, request: RolloutRequest) -> None:
        """It waits for delivery no longer, if it did."""
        if request in self.arrived:
            self.arrived.remove(request)
            self._scheduler.removed(request)

    def _settle(self, request: RolloutRequest) -> None:
        """It is here, or given up: the worker may write over its slab."""
        slot = request.slot
        slot.unsettled.discard(request.number)
        slot.open.discard(request)
        self._scheduler.refresh(slot)
        if slot.state is SlotState.LEAVING:
            self.check_drained(slot)

    # The end of a worker.

    def check_drained(self, slot: WorkerSlot) -> None:
        """If a worker that is to leave owes nothing any more, say so, once."""
        if slot.state is SlotState.LEAVING and not slot.owes_rollouts:
            slot.become(SlotState.DRAINED)
            self._commands(ReportDrained(slot))

    def vacate(self, slot: WorkerSlot) -> None:
        """A worker is gone, and with it what is neither here nor on its way here."""
        self._note_unknown(slot)
        for request in sorted(slot.open, key=lambda request: request.number):
            if request.state is RolloutState.FETCHING or request in self.kept:
                continue  # its answer will fail, or arrive
            self._collecting.pop(request, None)
            self._discard(request)
            self._give_up(request, "worker_lost")

    def _note_unknown(self, slot: WorkerSlot) -> None:
        """Count the frames that a worker may have stepped without a header that says so."""
        unknown = sum(request.header is None for request in slot.open)
        self._unaccounted[slot.worker_id, slot.incarnation] = unknown * self._plan.rollout_frames

    def account(self, worker_id: int, incarnation: int, cause: str, stepped: int | None) -> None:
        """Settle the frames of a process that is gone."""
        at_most = self._unaccounted.pop((worker_id, incarnation), 0)
        self._ledger.end(worker_id, incarnation, cause, stepped=stepped, at_most=at_most)

    def close(self) -> None:
        """Deliver nothing more; answers of workers are ignored from now on."""
        # Also rollouts that are on their way here, whether anybody wants them or not.
        self._ledger.lose_waiting("shut_down")
        for slot in self._slots:
            self._note_unknown(slot)
        self.arrived.take_all()


def origin(header: Header) -> tuple[int, int, int]:
    """What identifies a rollout in the run: worker_id, incarnation, sequence."""
    return header[:3]
