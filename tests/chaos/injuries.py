"""Injects random faults, and measures the time until they are noticed and repaired."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helpers.hosts import Hosts

import distcollect as dc
from chaos.checks import Checker
from chaos.envs import Order, Record
from chaos.joiners import Joiner, Joiners, pid_of
from distcollect.roster.membership import PRESENT

_ACT_S = 0.02
# Later than this is a failure. The machine is busy: several processes start on few cores.
_SLACK_S = 4.0
# From a fault until another process has delivered, including pauses between restarts.
_RECOVERY_S = 120.0

WEIGHTS = {
    "kill": 5,
    "stop": 2,
    "pause": 2,
    "raise in step": 2,
    "raise in reset": 2,
    "hang": 1,
    "hang with the GIL": 1,
    "leave": 1,
    "kill supervisor": 1,
}
HOST_WEIGHTS = {"unplug": 3, "slow": 1}
SERVER_WEIGHTS = {
    "kill server": 4,
    "stop server": 1,
    "pause server": 2,
    "end server": 2,
    "hang server": 1,
}
_SIGNALS = {
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "leave": signal.SIGTERM,
    "stop server": signal.SIGSTOP,
    "pause server": signal.SIGSTOP,
    "end server": signal.SIGTERM,
}
_ORDERS = {
    "hang server": Order.HANG,
    "raise in step": Order.RAISE_IN_STEP,
    "raise in reset": Order.RAISE_IN_RESET,
    "hang": Order.HANG,
    "hang with the GIL": Order.HANG_WITH_GIL,
}
# These end the process; it survives the others.
_FATAL = {"kill", "stop", "hang", "hang with the GIL", "kill supervisor", "leave"}
_FATAL |= {"kill server", "stop server", "hang server"}
# The counter of a process survives only if its supervisor does.
_LAST_WITNESS = {"kill supervisor", *HOST_WEIGHTS}


@dataclass(eq=False)
class Injury:
    """One fault.

    Attributes:
        kind: see WEIGHTS.
        record: the record of the process.
        at: when it happened.
        begun: whether the process has carried out the order.
        joiner: the joiner that brings the replacement; None if the trainer does.
        heal_at: when to end the fault.
        heal: ends the fault.
        healed_at: when the fault was ended.
        lasts_s: how long the fault lasts.
        num_envs: the number of the process's envs seen before.
        detected_s: the time until it was noticed.
        recovered_s: the time until new frames came, from ``healed_at`` if that is set.
        over: whether it is finished.
    """

    kind: str
    record: Record
    at: float
    begun: bool = False
    joiner: Joiner | None = None
    heal_at: float | None = None
    heal: Callable[[], None] | None = None
    healed_at: float | None = None
    lasts_s: float = 0.0
    num_envs: int = 0
    detected_s: float | None = None
    recovered_s: float | None = None
    over: bool = False

    @property
    def worker(self) -> str:
        """The worker and incarnation, as text."""
        if self.is_of_server:
            return f"process {self.record.token:012x}"
        return f"worker {self.record.worker_id}.{self.record.incarnation}"

    @property
    def is_of_server(self) -> bool:
        """Whether an inference server is injured."""
        return self.kind in SERVER_WEIGHTS

    def __str__(self) -> str:
        lasted = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        parts = [f"{self.kind}{lasted}: {self.worker}"]
        if self.detected_s is not None:
            parts.append(f"seen after {self.detected_s:.2f} s")
        if self.recovered_s is not None:
            healed = " from then on" if self.healed_at is not None else ""
            parts.append(f"frames again after {self.recovered_s:.2f} s{healed}")
        if not self.over:
            parts.append("the round ended before")
        return ", ".join(parts)


class Injuries:
    """Chooses faults and workers, and follows each fault until it is over.

    Attributes:
        done: all faults of the run.
    """

    def __init__(
        self, rng: random.Random, hosts: Hosts | None, checker: Checker, every_s: float
    ) -> None:
        """Inject one fault every ``every_s`` on average; ``hosts``: to be injured too."""
        self.done: list[Injury] = []
        self._rng = rng
        self._hosts = hosts
        self._checker = checker
        self._every_s = every_s

    def begin(
        self,
        collector: dc.RPCDataCollector,
        faults: dc.Faults,
        folder: Path,
        joiners: Joiners,
        address: str,
        *,
        servers: Path | None,
    ) -> None:
        """Begin a round; ``folder`` has the records of workers, ``servers`` those of servers."""
        self._collector = collector
        self._faults = faults
        self._folder = folder
        self._server_folder = servers
        self._joiners = joiners
        self._address = address
        self._records: dict[int, Record] = {}
        self._open: list[Injury] = []
        self._begun = len(self.done)
        self._next_at = time.monotonic() + 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Inject no more faults, and end none."""
        self._ended.set()
        self._thread.join()

    def end(self) -> tuple[Counter[int], bool]:
        """End the round: end all faults that can be ended.

        Returns:
            The number of processes that died in each slot, and whether a supervisor was lost that
            alone knew how many frames a process had stepped.
        """
        arrived = {record.joiner for record in self.records() if record.token in self._checker.seen}
        for joiner in self._joiners.all:
            # A joiner that has not arrived finds no trainer.
            joiner.may_end |= joiner.number not in arrived
        for injury in self._open:
            if injury.heal is not None and injury.healed_at is None:
                with contextlib.suppress(OSError):
                    injury.heal()
            if injury.kind in HOST_WEIGHTS and injury.joiner is not None:
                injury.joiner.may_end = True  # it may learn too late that the run is over
            print(f"  {injury}", flush=True)
        mine = self.done[self._begun :]
        deaths: Counter[int] = Counter()
        for injury in mine:
            # An unplugged host may lose a process and the one that replaces it.
            fatal = injury.kind in _FATAL
            if injury.is_of_server:  # which costs no frame
                continue
            deaths[injury.record.worker_id] += 2 if injury.kind in HOST_WEIGHTS else fatal
        return deaths, any(injury.kind in _LAST_WITNESS for injury in mine)

    def records(self) -> list[Record]:
        """The records of all processes of this round."""
        for path in self._folder.iterdir():
            if not path.suffix and int(path.name, 16) not in self._records:
                record = Record(path)
                self._records[record.token] = record
        return list(self._records.values())

    def _act(self) -> None:
        """Begin and end faults in a thread, independent of batches."""
        while not self._ended.wait(_ACT_S):
            try:
                self._tick(time.monotonic())
            except Exception:  # noqa: BLE001 - the run fails, and says why
                self._checker.fail(f"injuring failed: {traceback.format_exc()}")
                return

    def _tick(self, now: float) -> None:
        states = self._collector.worker_states
        for injury in list(self._open):
            is_gone = states.get(injury.record.worker_id) not in PRESENT and not injury.is_of_server
            if is_gone and injury.detected_s is None and not injury.kind.startswith("raise"):
                injury.detected_s = now - injury.at
            self._follow(injury, now)
        if now >= self._next_at:
            self._next_at = now + self._rng.expovariate(1 / self._every_s)
            self._injure(now)

    def _follow(self, injury: Injury, now: float) -> None:
        if injury.heal_at is not None and now >= injury.heal_at and injury.healed_at is None:
            assert injury.heal is not None
            with contextlib.suppress(ProcessLookupError):
                injury.heal()
            injury.healed_at = time.monotonic()
        if not injury.begun:
            self._follow_order(injury, now)
            return
        if injury.kind.startswith("raise"):
            self._follow_env(injury)
        elif injury.recovered_s is None:
            recovered_at = self._recovered_at(injury)
            if recovered_at is not None:
                injury.recovered_s = recovered_at - (injury.healed_at or injury.at)
        age_s = now - (injury.healed_at or injury.at)
        due_s = self._due_s(injury)
        if due_s is not None and injury.detected_s is None and now - injury.at > due_s:
            self._over(injury, f"was not noticed within {due_s:.1f} s")
        elif injury.recovered_s is not None:
            lost = injury.detected_s is not None and injury.kind in ("pause", "slow")
            self._over(injury, "lost a worker that should have stayed" if lost else "")
        elif age_s > _RECOVERY_S and (injury.heal_at is None or injury.healed_at is not None):
            self._over(injury, f"no frames again within {_RECOVERY_S:g} s")

    def _over(self, injury: Injury, wrong: str) -> None:
        injury.over = True
        self._open.remove(injury)
        print(f"  {injury}", flush=True)
        if wrong:
            self._checker.fail(f"{injury}: {wrong}; {self._collector.worker_states}")

    def _due_s(self, injury: Injury) -> float | None:
        """The time within which it must be noticed; None if it need not be."""
        faults = self._faults
        if injury.kind in ("kill", "kill supervisor"):
            return 1.0 + _SLACK_S
        if injury.kind == "stop":
            return faults.silence_timeout_s * 1.25 + _SLACK_S
        if injury.kind.startswith("hang"):
            assert faults.step_timeout_s is not None
            return faults.step_timeout_s * 1.5 + _SLACK_S
        if injury.kind == "leave":
            return faults.leave_timeout_s + _SLACK_S
        if injury.kind == "unplug":
            due_s = faults.silence_timeout_s * 1.25 + _SLACK_S
            return due_s if injury.lasts_s > due_s else None
        return None

    def _follow_order(self, injury: Injury, now: float) -> None:
        """Wait until the next step or reset, where the process carries the order out."""
        injury.begun = injury.record.obeyed_at >= injury.at
        if injury.begun:
            injury.at = injury.record.obeyed_at
        elif now - injury.at > _RECOVERY_S:
            self._over(injury, f"it was not asked for a step within {_RECOVERY_S:g} s")

    def _follow_env(self, injury: Injury) -> None:
        seen = self._checker.seen.get(injury.record.token)
        if seen is not None and len(seen.envs) > injury.num_envs:
            injury.recovered_s = injury.detected_s = seen.last_at - injury.at

    def _recovered_at(self, injury: Injury) -> float | None:
        """When the replacement's first frame was delivered; None if it was not yet."""
        if injury.is_of_server:
            return self._served_again_at(injury)
        candidates = [
            self._checker.seen[record.token].first_at
            for record in self.records()
            if record.token in self._checker.seen and self._replaces(record, injury)
        ]
        if injury.kind in _FATAL:
            return min(candidates, default=None)
        # It may be the same process: only frames collected since then count.
        if injury.healed_at is None:
            return None
        same = [
            self._checker.seen[record.token].last_at
            for record in self.records()
            if record.token in self._checker.seen
            and (record.token == injury.record.token or self._replaces(record, injury))
        ]
        return min((at for at in same if at > injury.healed_at), default=None)

    def _served_again_at(self, injury: Injury) -> float | None:
        """When the first frame of the server after it, or later on of the same, came.

        A server ends with its workers: SIGTERM alone is not for it.
        """
        servers = self._checker.servers
        mine = servers[injury.record.token]
        if injury.kind in _FATAL:
            others = (each for token, each in servers.items() if token != injury.record.token)
            later = (s.first_at for s in others if s.first_at > injury.at)
            return min(later, default=None)
        since = injury.at + 1 if injury.kind == "end server" else injury.healed_at
        return mine.last_at if since is not None and mine.last_at > since else None

    def _replaces(self, record: Record, injury: Injury) -> bool:
        if injury.joiner is not None:
            return record.joiner == injury.joiner.number and record.token != injury.record.token
        mine = injury.record
        in_its_place = record.worker_id == mine.worker_id
        return in_its_place and bool(record.incarnation > mine.incarnation)

    def _injure(self, now: float) -> None:
        weights = {
            **WEIGHTS,
            **(HOST_WEIGHTS if self._hosts is not None else {}),
            **(SERVER_WEIGHTS if self._server_folder is not None else {}),
        }
        kind = self._rng.choices([*weights], [*weights.values()])[0]
        if kind in SERVER_WEIGHTS:
            victims = self._servers()
        else:
            victims = [record for record in self._victims() if self._fits(kind, record)]
        if not victims:
            return
        record = self._rng.choice(sorted(victims, key=lambda r: (r.worker_id, r.incarnation)))
        seen = self._checker.seen.get(record.token)
        num_envs = 0 if seen is None else len(seen.envs)
        injury = Injury(kind, record, now, begun=kind not in _ORDERS, num_envs=num_envs)
        self.done.append(injury)
        if self._do(injury):
            self._open.append(injury)
        else:
            self.done.remove(injury)

    def _servers(self) -> list[Record]:
        """The inference servers that work and have no fault."""
        injured = {injury.record.token for injury in self._open}
        found = []
        for token in self._checker.servers.copy():
            record = Record(self._server_folder / f"{token:012x}")
            if token not in injured and pid_of(record) is not None:
                found.append(record)
        return found

    def _victims(self) -> list[Record]:
        """The processes that work and have no other fault."""
        states = self._collector.worker_states
        busy = {injury.record.worker_id for injury in self._open}
        cut_off = {injury.record.joiner for injury in self._open if injury.record.joiner >= 0}
        newest: dict[int, Record] = {}
        for record in self.records():
            held = newest.get(record.worker_id)
            if held is None or record.incarnation > held.incarnation:
                newest[record.worker_id] = record
        return [
            record
            for worker_id, record in newest.items()
            if states.get(worker_id) in PRESENT
            and worker_id not in busy
            and record.joiner not in cut_off
            and record.token in self._checker.seen
        ]

    def _fits(self, kind: str, record: Record) -> bool:
        joiner = self._joiner_of(record)
        if kind in HOST_WEIGHTS:
            return joiner is not None and joiner.host > 0
        if kind == "kill supervisor":
            return joiner is not None
        # One worker must stay: without any worker the run ends.
        return not (kind == "leave" and record.worker_id == 0)

    def _joiner_of(self, record: Record) -> Joiner | None:
        return next((j for j in self._joiners.all if j.number == record.joiner), None)

    def _do(self, injury: Injury) -> bool:
        """Inject the fault; return whether that was possible."""
        record, joiner = injury.record, self._joiner_of(injury.record)
        if injury.kind in _ORDERS:
            record.give(_ORDERS[injury.kind])
            return True
        if injury.kind in HOST_WEIGHTS:
            assert joiner is not None
            self._harm_host(injury, joiner)
            return True
        leaves = injury.kind in ("leave", "kill supervisor")
        pid = joiner.pid() if joiner is not None and leaves else pid_of(record)
        if pid is None:
            return False
        if joiner is not None and leaves:
            joiner.may_end = True
        try:
            injury.at = time.monotonic()
            os.kill(pid, _SIGNALS.get(injury.kind, signal.SIGKILL))
        except ProcessLookupError:
            return False
        if injury.kind.startswith("pause"):
            # Its last message may be a quarter of that time old.
            injury.lasts_s = self._rng.uniform(0.1, 0.5) * self._faults.silence_timeout_s
            injury.heal_at = injury.at + injury.lasts_s
            injury.heal = lambda: os.kill(pid, signal.SIGCONT)
        if leaves:
            injury.joiner = self._joiners.start(joiner.host if joiner else 0, self._address)
        return True

    def _harm_host(self, injury: Injury, joiner: Joiner) -> None:
        hosts, host = self._hosts, joiner.host
        assert hosts is not None
        injury.joiner = joiner
        injury.lasts_s = self._rng.uniform(3, 20)
        slow = "slow", "--delay-ms", "30", "--loss", "1"
        harm, heal = (slow, ("slow", "off")) if injury.kind == "slow" else (("unplug",), ("plug",))
        hosts.do(host, *harm)
        injury.at = time.monotonic()
        injury.heal_at = injury.at + injury.lasts_s
        injury.heal = lambda: hosts.do(host, *heal)
