"""When to request rollouts and which to deliver first, so that none gets older than allowed.

Pure: no clock, no thread, no socket.

Versions count up from 1, one per publication, and each is sent to some slots. The lag of a frame
with version v of worker w is the number of versions above v that were sent to w's slot: a worker
that was left out of a publication on purpose does not lag for that. The age of a frame is the
number of versions above v, whichever slots they were sent to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distcollect.config import Staleness

# Bounds on lag are small: no lag that matters is larger.
_VERSIONS_KEPT = 4096
# How many bursts of publications, and gaps between them, the pacer remembers.
_HABIT = 4


class SentVersions:
    """Records which versions were sent to which slot.

    Attributes:
        acknowledged: gives the newest version that the process in a slot has acknowledged.
        is_coming: tells whether weights are on their way to a slot.
        holder: gives the slot that has the policy of the worker in a slot: that of its inference
            server, if it has one.
        generation: grows with each publication.
        newest_of_all: the newest version sent to any slot; 0 if none was.
    """

    def __init__(
        self,
        acknowledged: Callable[[int], int] = lambda _: 0,
        holder: Callable[[int], int] = lambda worker_id: worker_id,
        is_coming: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.acknowledged, self.holder, self.is_coming = acknowledged, holder, is_coming
        self.generation = self.newest_of_all = 0
        self._sent: dict[int, list[int]] = {}

    def publish(self, version: int, worker_ids: Iterable[int]) -> None:
        """Record that ``version`` goes to these slots.

        A slot's newest version may be recorded again, as for a new process in it: nothing changes.

        Raises:
            ValueError: a newer version was sent to one of them before.
        """
        for worker_id in worker_ids:
            sent = self._sent.setdefault(self.holder(worker_id), [])
            newest = self.newest(worker_id)
            if version < newest:
                raise ValueError(f"worker {worker_id}: version {version} comes after {newest}")
            if version > newest:
                self.generation += 1
                self.newest_of_all = max(version, self.newest_of_all)
                sent.append(version)
                del sent[:-_VERSIONS_KEPT]

    def newest(self, worker_id: int) -> int:
        """The newest version sent to this slot; 0 if none was."""
        sent = self._sent.get(self.holder(worker_id))
        return sent[-1] if sent else 0

    def is_up_to_date(self, worker_id: int) -> bool:
        """Return True if the process in this slot has the newest weights sent to it."""
        return self.acknowledged(worker_id) >= self.newest(worker_id)

    def lag(self, worker_id: int, version: int) -> int:
        """Return how many versions newer than ``version`` were sent to this slot; at most 4096."""
        sent = self._sent.get(self.holder(worker_id))
        if not sent or sent[-1] <= version:
            return 0
        return len(sent) - bisect_right(sent, version)

    def age(self, version: int) -> int:
        """Return how many versions newer than ``version`` there are."""
        return max(0, self.newest_of_all - version)

    def slack(self, bound: Staleness, worker_id: int, version: int) -> int:
        """Return how many more versions a frame of this slot can take; below 0 it is too old."""
        return bound.slack(self.lag(worker_id, version), self.age(version))


@dataclass(eq=False, slots=True)
class StalenessTicket:
    """A rollout that was requested and not delivered yet; equal only to itself.

    Attributes:
        worker_id: the worker that collects it.
        version: no frame of it has a lower one. Until it has arrived it is the version that the
            worker had acknowledged at the request, then the one that the header says.
    """

    worker_id: int
    version: int


class Pacer:
    """Limits the number of tickets, and orders deliveries, so that no rollout gets too stale.

    The slack of a ticket is how many more publications it can take. Publications are
    expected as they came lately: in bursts without a delivery in between (mostly of 1), and with a
    number of deliveries from one burst to the next (the gap; 1 until one is known). Tickets are
    feasible if, delivered by rising slack, each has enough for what may be published before its
    turn. No ticket is added that would make them infeasible. So none gets too stale as long as
    publications come no denser than lately; when they do, some may.

    Nothing waits forever: while the user waits for a batch nothing is published, so that a single
    ticket is feasible then even with slack 0. If another thread publishes during that time,
    rollouts may be lost, but collection does not stall.
    """

    def __init__(self, bound: Staleness, versions: SentVersions) -> None:
        """Pace by ``versions``.

        Args:
            bound: how old a frame may be when it is delivered.
            versions: what is sent; the caller records publications there.
        """
        self._bound = bound
        self.max_slack = bound.slack(0, 0)  # that a ticket can have
        self._versions = versions
        self._tickets: dict[StalenessTicket, int] = {}  # and the slack that was counted for each
        self._num_by_slack: dict[int, int] = {}  # without the tickets that are too stale
        self._generation = 0  # of the versions by which slacks were counted
        self._bursts: deque[int] = deque(maxlen=_HABIT)
        self._gaps: deque[int] = deque(maxlen=_HABIT)
        self._burst = 1
        self._gap = 1
        self._since = 1  # deliveries since the last publication; the first may come at once
        self._awaited = False
        self._needed: int | None = None  # least slack of a further ticket; None: not worked out

    def awaited(self) -> None:
        """Note that the user waits for a batch, and so publishes nothing until it is delivered."""
        self._awaited = True
        self._needed = None

    def published(self) -> None:
        """Note a publication; call it after :meth:`SentVersions.publish`."""
        if self._bursts and self._since == 0:
            self._bursts[-1] += 1
        else:
            if self._bursts:
                self._gaps.append(self._since)
            self._bursts.append(1)
            self._since = 0
        self._burst = max(self._bursts)
        self._gap = min(self._gaps, default=1)
        self._needed = None

    def needed_slack(self) -> int:
        """The least slack that a further ticket has to have now.

        That may change with whatever the pacer is told.
        """
        self._count()
        if self._needed is None:
            self._needed = self._least_feasible()
        return self._needed

    def arrived(self, ticket: StalenessTicket, version: int) -> None:
        """Note that its header says that no frame has a version below ``version``."""
        if version != ticket.version:
            self.given_up(ticket)
            ticket.version = version
            self.ask(ticket)

    def delivered(self, ticket: StalenessTicket) -> None:
        """Note that the user got this rollout; KeyError if it is not out."""
        self.given_up(ticket)
        self._since += 1
        self._awaited = False

    def may_deliver(self, ticket: StalenessTicket) -> bool:
        """Return True to deliver this rollout now, which has arrived and is not too stale.

        Not if one with less slack has to go first, lest it or another gets too stale.
        """
        self._count()
        slack = self._tickets[ticket]
        # By rising slack is the best order there is.
        if slack == min(self._num_by_slack) or not self._is_feasible():
            return True
        self._num_by_slack[slack] -= 1
        may = self._is_feasible(first=1)
        self._num_by_slack[slack] += 1
        return may

    @property
    def lowest_slack(self) -> int:
        """The least slack of all tickets that are not too stale; 0 if there are none."""
        self._count()
        return min(self._num_by_slack, default=0)

    def slack(self, worker_id: int, version: int) -> int:
        """Return how many more publications a frame of this slot and version can take."""
        return self._versions.slack(self._bound, worker_id, version)

    def ask(self, ticket: StalenessTicket) -> None:
        """Note that this rollout is requested."""
        slack = self.slack(ticket.worker_id, ticket.version)
        self._tickets[ticket] = slack
        if slack >= 0:
            self._num_by_slack[slack] = self._num_by_slack.get(slack, 0) + 1
        self._needed = None

    def given_up(self, ticket: StalenessTicket) -> None:
        """Note that the user will not get this rollout; KeyError if it is not out."""
        slack = self._tickets.pop(ticket)
        if slack >= 0:
            self._num_by_slack[slack] -= 1
            if not self._num_by_slack[slack]:
                del self._num_by_slack[slack]
        self._needed = None

    def _count(self) -> None:
        """Count the slacks again if versions were sent since; otherwise they have not changed."""
        if self._generation == self._versions.generation:
            return
        self._generation = self._versions.generation
        tickets, self._tickets = self._tickets, {}
        self._num_by_slack.clear()
        for ticket in tickets:
            self.ask(ticket)

    def _least_feasible(self) -> int:
        """The least slack of a further ticket with which all slacks suffice.

        It is ``max_slack`` plus 1 if none does.
        """
        none = self.max_slack + 1
        if self.max_slack < self._publications_within(sum(self._num_by_slack.values())):
            return none  # not even one that is delivered after all others
        least = before = 0
        up_to = dict.fromkeys(range(none), 0)  # how many tickets have at most this slack
        for slack in sorted(self._num_by_slack):
            before += self._num_by_slack[slack]
            if slack < self._publications_within(before - 1):
                return none
            if slack < self._publications_within(before):
                least = slack + 1  # these can't wait for one more
            up_to[slack] = before
        before = 0
        for slack, count in up_to.items():
            before = max(before, count)
            if slack >= least and slack >= self._publications_within(before):
                return slack
        return none

    def _is_feasible(self, first: int = 0) -> bool:
        """Return True if all slacks suffice if ``first`` other tickets are delivered before."""
        before = first
        for slack in sorted(self._num_by_slack):
            count = self._num_by_slack[slack]
            before += count
            # Of the tickets with this slack the last one has to wait longest.
            if count and slack < self._publications_within(before - 1):
                return False
        return True

    def _publications_within(self, deliveries: int) -> int:
        """The most publications to expect until so many deliveries are made and one more is due."""
        if self._awaited:
            now, since = 0, min(self._since, self._gap - 1)
        else:
            now = self._burst - self._bursts[-1] if self._since == 0 else 0
            since = min(self._since, self._gap)
        return now + self._burst * ((since + deliveries) // self._gap)
