"""Every frame that a worker stepped: delivered, or lost and why.

Pure bookkeeping; the caller holds the lock. For each process

    stepped = delivered + waiting + lost by cause + not known yet

Once the process has ended, the last term counts as lost, by the cause of its end. The number of
frames that a process stepped comes with each rollout's header, and at its end from a counter that
outlives it. If that counter can't be read (its host is gone), the frames that it stepped since its
last header are "at most" those of the rollout that was requested from it, or a multiple of these
where rows of its envs are not at the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from distcollect.results import Frames, LedgerReport
from distcollect.rollout.header import Header


@dataclass(slots=True)
class _Account:
    """The frames of one process, or of several that have ended."""

    stepped: int = 0
    delivered: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    at_most: int = 0
    env_faults: int = 0

    def add(self, other: _Account) -> None:
        self.stepped += other.stepped
        self.delivered += other.delivered
        self.lost.update(other.lost)
        self.at_most += other.at_most
        self.env_faults += other.env_faults

    def frames(self) -> Frames:
        lost = {cause: count for cause, count in sorted(self.lost.items()) if count}
        settled = self.delivered + sum(lost.values())
        is_open = self.stepped - settled
        return Frames(self.stepped, self.delivered, lost, is_open, self.at_most, self.env_faults)


@dataclass(slots=True)
class _Process:
    """All that is known of a process.

    Attributes:
        own_losses: frames that it reported as lost itself, by cause.
        waiting: sequence number to frames, of rollouts that were announced and not settled.
        next_sequence: the sequence number of its next rollout.
        ended: it has ended.
    """

    account: _Account = field(default_factory=_Account)
    own_losses: Mapping[str, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    next_sequence: int = 0
    ended: bool = False


class Ledger:
    """Accounts for every frame, exactly once by (worker_id, incarnation, sequence)."""

    def __init__(self) -> None:
        self._past: dict[int, _Account] = {}
        self._processes: dict[tuple[int, int], _Process] = {}
        self._settled: set[tuple[int, int]] = set()  # processes of which nothing more is to come

    def announce(self, header: Header) -> None:
        """A rollout lies on its worker.

        Raises:
            ValueError: it was announced before, or the one before it was not.
        """
        worker_id, incarnation, sequence = header[:3]
        process = self._process(worker_id, incarnation)
        if process.ended or sequence != process.next_sequence:
            awaited = "none" if process.ended else process.next_sequence
            raise ValueError(
                f"worker {worker_id}, incarnation {incarnation}: rollout {sequence} was announced, "
                f"but {awaited} is next"
            )
        process.next_sequence += 1
        process.waiting[sequence] = header.num_frames
        process.account.stepped = header.stepped
        process.account.env_faults = header.env_faults
        if header.lost:
            for cause, count in header.lost:
                process.account.lost[cause] += count - process.own_losses.get(cause, 0)
            process.own_losses = dict(header.lost)

    def env_failed(self, worker_id: int, incarnation: int, env_faults: int) -> None:
        """An env raised too often, after ``env_faults`` faults in this process in all."""
        process = self._process(worker_id, incarnation)
        if not process.ended:
            process.account.env_faults = env_faults

    def deliver(self, worker_id: int, incarnation: int, sequence: int) -> None:
        """The user has a rollout. KeyError if it does not wait: it was settled before."""
        process = self._processes[worker_id, incarnation]
        process.account.delivered += process.waiting.pop(sequence)
        if process.ended:
            self._forget(worker_id, incarnation)

    def lose(self, worker_id: int, incarnation: int, sequence: int, cause: str) -> None:
        """The user will never have a rollout. KeyError as for :meth:`deliver`."""
        process = self._processes[worker_id, incarnation]
        process.account.lost[cause] += process.waiting.pop(sequence)
        self._forget(worker_id, incarnation)

    def lose_waiting(self, cause: str) -> None:
        """The user will have none of the rollouts that wait."""
        for (worker_id, incarnation), process in list(self._processes.items()):
            for sequence in list(process.waiting):
                self.lose(worker_id, incarnation, sequence, cause)

    def end(
        self, worker_id: int, incarnation: int, cause: str, *, stepped: int | None, at_most: int = 0
    ) -> None:
        """A process has ended: frames of it that no header reported are lost by ``cause``.

        Args:
            worker_id: its slot.
            incarnation: which process.
            cause: of its end.
            stepped: frames that it stepped in all; None: not known.
            at_most: if not known, it stepped no more than this since its last header.
        """
        process = self._process(worker_id, incarnation)
        if process.ended:
            return
        process.ended = True
        account = process.account
        if stepped is None:
            account.at_most = at_most
        else:
            account.stepped = stepped
        known = account.delivered + account.lost.total() + sum(process.waiting.values())
        account.lost[cause] += account.stepped - known
        self._forget(worker_id, incarnation)

    def report(self) -> LedgerReport:
        """Where all frames went, as far as is known now."""
        accounts: dict[int, _Account] = {}
        for worker_id, past in self._past.items():
            accounts.setdefault(worker_id, _Account()).add(past)
        for (worker_id, _), process in self._processes.items():
            accounts.setdefault(worker_id, _Account()).add(process.account)
        total = _Account()
        for account in accounts.values():
            total.add(account)
        workers = {worker_id: accounts[worker_id].frames() for worker_id in sorted(accounts)}
        return LedgerReport(workers, total.frames())

    def _process(self, worker_id: int, incarnation: int) -> _Process:
        key = worker_id, incarnation
        if key in self._settled:
            return _Process(ended=True)
        if key not in self._processes:
            self._processes[key] = _Process()
        return self._processes[key]

    def _forget(self, worker_id: int, incarnation: int) -> None:
        """If nothing more is to come of a process, keep only its sums."""
        process = self._processes[worker_id, incarnation]
        if process.ended and not process.waiting:
            self._past.setdefault(worker_id, _Account()).add(process.account)
            self._settled.add((worker_id, incarnation))
            del self._processes[worker_id, incarnation]
