"""Who may collect when, and what is handed on when, so that no rollout gets older than allowed.

Pure decisions: no clock, no thread, no socket. Nothing here locks; the caller does.

Versions count up from 1, one per publication, and each goes to some slots. The lag of a frame with
version v of worker w is the number of versions above v that were sent to w's slot: a worker left
out of a publication on purpose is not late.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Bounds on lag are small; this many versions per slot tell any lag that matters.
_VERSIONS_KEPT = 4096
# How far back the user's habit of publishing is looked up, in bursts and the gaps between them.
_HABIT = 4


class SentVersions:
    """Which versions were sent to which slot."""

    def __init__(self) -> None:
        self._sent: dict[int, list[int]] = {}

    def publish(self, version: int, worker_ids: Iterable[int]) -> None:
        """Record that ``version`` goes to these slots.

        A slot's newest version may be recorded again, as for a new process in it: nothing changes.

        Raises:
            ValueError: a newer version was sent to one of them before.
        """
        for worker_id in worker_ids:
            sent = self._sent.setdefault(worker_id, [])
            newest = self.newest(worker_id)
            if version < newest:
                raise ValueError(f"worker {worker_id}: version {version} comes after {newest}")
            if version > newest:
                sent.append(version)
                del sent[:-_VERSIONS_KEPT]

    def newest(self, worker_id: int) -> int:
        """The newest version sent to this slot; 0 if none was."""
        sent = self._sent.get(worker_id)
        return sent[-1] if sent else 0

    def lag(self, worker_id: int, version: int) -> int:
        """How many versions newer than ``version`` were sent to this slot; says 4096 for more."""
        sent = self._sent.get(worker_id, [])
        return len(sent) - bisect_right(sent, version)


@dataclass(eq=False, slots=True)
class StalenessTicket:
    """A rollout that was asked for and not delivered yet; equal only to itself.

    Attributes:
        worker_id: whose it is.
        version: no frame of it has a lower one. What the worker had acknowledged when it was
            asked, or what the header says once :meth:`Pacer.arrived` is told.
    """

    worker_id: int
    version: int


class Pacer:
    """Limits the tickets, and orders deliveries, so that each comes before it is too stale.

    The slack of a ticket is how many more publications to its slot it can take. Publications are
    expected as they came of late: in bursts of so many without a delivery in between (mostly 1),
    and with so many deliveries from one burst to the next (the gap; 1 until one is known). Tickets
    are feasible if, delivered by rising slack, each has enough for what may be published before its
    turn, and none is added that would make them infeasible. So none gets too stale as long as
    publications come no thicker than of late; where they do, some may.

    Nobody waits forever: while the user waits for a batch nothing is published, so that a single
    ticket is feasible then even with slack 0. Whoever publishes during that time, from another
    thread, may lose rollouts, but not stall.
    """

    def __init__(self, max_policy_lag: int, versions: SentVersions) -> None:
        """Hold back for ``versions``.

        Args:
            max_policy_lag: the highest lag, in versions, of any frame when it is delivered; >= 0.
            versions: what is sent; the caller records publications there.
        """
        self._max_policy_lag = max_policy_lag
        self._versions = versions
        self._tickets: set[StalenessTicket] = set()
        self._bursts: deque[int] = deque(maxlen=_HABIT)
        self._gaps: deque[int] = deque(maxlen=_HABIT)
        self._burst = 1
        self._gap = 1
        self._since = 1  # deliveries since the last publication; the first may come at once
        self._awaited = False
        self._needed: int | None = None  # least slack of a further ticket; None: not worked out

    def __len__(self) -> int:
        """How many tickets are out."""
        return len(self._tickets)

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

    def may_ask(self, worker_id: int, acknowledged: int) -> bool:
        """Whether this worker, with this version acknowledged, may be asked for a rollout now.

        If not, that may change with its next acknowledgement and whatever the pacer is told.
        """
        if self._needed is None:
            slacks = self._slacks()
            self._needed = bisect_left(
                range(self._max_policy_lag + 1),
                True,
                key=lambda slack: self._feasible(sorted([*slacks, slack])),
            )
        return self._slack(worker_id, acknowledged) >= self._needed

    def ask(self, worker_id: int, acknowledged: int) -> StalenessTicket:
        """Note that the worker is asked for a rollout."""
        ticket = StalenessTicket(worker_id, acknowledged)
        self._tickets.add(ticket)
        self._needed = None
        return ticket

    def arrived(self, ticket: StalenessTicket, version: int) -> None:
        """Note that its header says that no frame has a version below ``version``."""
        ticket.version = version
        self._needed = None

    def delivered(self, ticket: StalenessTicket) -> None:
        """Note that the user got this rollout; KeyError if it is not out."""
        self.given_up(ticket)
        self._since += 1
        self._awaited = False

    def given_up(self, ticket: StalenessTicket) -> None:
        """Note that the user will not get this rollout; KeyError if it is not out."""
        self._tickets.remove(ticket)
        self._needed = None

    def too_stale(self, ticket: StalenessTicket) -> bool:
        """Whether its lag is above the bound, as far as is known before it has arrived."""
        return self._slack(ticket.worker_id, ticket.version) < 0

    def choose(self, arrived: Sequence[StalenessTicket]) -> StalenessTicket | None:
        """Which of the arrived rollouts to hand on now.

        Args:
            arrived: in the order of their arrival; those too stale are passed over.

        Returns:
            The one with the least slack, the first of several; None if there is none, or if one
            that has not arrived has to go first lest it or another gets too stale.
        """
        slacks = self._slacks()
        fresh = [ticket for ticket in arrived if not self.too_stale(ticket)]
        if not fresh:
            return None
        chosen = min(fresh, key=lambda ticket: self._slack(ticket.worker_id, ticket.version))
        if self._feasible(slacks):
            slacks.remove(self._slack(chosen.worker_id, chosen.version))
            if not self._feasible(slacks, first=1):
                return None
        return chosen

    def _slack(self, worker_id: int, version: int) -> int:
        return self._max_policy_lag - self._versions.lag(worker_id, version)

    def _slacks(self) -> list[int]:
        """Of all tickets that are not lost anyway, rising."""
        slacks = (self._slack(ticket.worker_id, ticket.version) for ticket in self._tickets)
        return sorted(slack for slack in slacks if slack >= 0)

    def _feasible(self, slacks: Iterable[int], first: int = 0) -> bool:
        """Whether rising slacks suffice if ``first`` other tickets are delivered before."""
        return all(slack >= self._publications_within(n) for n, slack in enumerate(slacks, first))

    def _publications_within(self, deliveries: int) -> int:
        """The most publications to expect until so many deliveries are made and one more is due."""
        if self._awaited:
            now, since = 0, min(self._since, self._gap - 1)
        else:
            now = self._burst - self._bursts[-1] if self._since == 0 else 0
            since = min(self._since, self._gap)
        return now + self._burst * ((since + deliveries) // self._gap)


def lagging(acknowledged: Mapping[int, int], current_version: int, more_than: int) -> list[int]:
    """The workers more than ``more_than`` versions behind, in the order of their ids.

    All versions count, not only those sent to a worker: who gets few falls behind.

    Args:
        acknowledged: ``{worker_id: newest version it has}``.
        current_version: the newest there is.
        more_than: so many versions behind are fine.
    """
    return sorted(
        worker_id
        for worker_id, version in acknowledged.items()
        if current_version - version > more_than
    )
