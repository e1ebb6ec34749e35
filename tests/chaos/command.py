"""Rounds of collection with random faults: arguments, the loop, and the final report."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from helpers.hosts import Hosts
from helpers.marked import Marked

import distcollect as dc
from chaos.checks import Checker, Plan
from chaos.envs import Maker, Marking
from chaos.injuries import Injuries
from chaos.joiners import Joiners
from distcollect.results import LedgerReport
from distcollect.roster.membership import PRESENT

_HOSTS = 2, 3  # those of the testbed that take part
_SETTLE_S = 20.0
_PUSH_WAIT_S = 1.0
_JOINED_TIMEOUT_S = 100.0  # a supervisor may wait until its network is back
_FAULTS = dc.Faults(
    start_timeout_s=120.0,
    batch_timeout_s=120.0,
    weights_timeout_s=10.0,
    leave_timeout_s=10.0,
    silence_timeout_s=4.0,
    step_timeout_s=6.0,
    max_restarts=100_000,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all rounds; return 0 if all checks held."""
    given = _parse(argv)
    if given.hosts and (os.geteuid() != 0 or not shutil.which("ip")):
        print("chaos: --hosts makes network namespaces: needs root and iproute2")
        return 2
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="distcollect-chaos-") as name:
        folder = Path(name)
        logging.basicConfig(filename=given.log or folder / "trainer.log", level=logging.INFO)
        logging.getLogger().handlers[0].setFormatter(
            logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
        )
        with Hosts() if given.hosts else contextlib.nullcontext() as hosts:
            run = _Run(given, random.Random(seed), hosts, folder)
            failures = run.all_rounds(given.seconds)
        if failures and given.log is None:
            print("--- the trainer's log, its last lines")
            print("\n".join((folder / "trainer.log").read_text().splitlines()[-60:]))
    run.tell()
    if failures:
        print(f"\n{len(failures)} checks FAILED with seed {seed}:")
        print("\n".join(f"  {failure}" for failure in failures))
    else:
        print(f"\nall checks held; seed {seed}")
    return int(bool(failures))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/chaos/run.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="in all (default: 120)")
    parser.add_argument("--seed", type=int, help="of the injuries; else drawn, and printed")
    parser.add_argument("--workers", type=int, default=3, help="that the trainer starts")
    parser.add_argument("--every", type=float, default=3.0, metavar="SECONDS", help="an injury")
    parser.add_argument("--round", type=float, default=150.0, metavar="SECONDS", help="of one mode")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sync", dest="sync", action="store_true", default=None)
    mode.add_argument("--async", dest="sync", action="store_false", help="else both in turn")
    parser.add_argument("--hosts", action="store_true", help="two more, as namespaces; needs root")
    parser.add_argument("--transport", choices=["rpc", "tcp"], help="tcp: with TLS between hosts")
    parser.add_argument("--inference", action="store_true", help="by servers, injured too")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the trainer's log is kept")
    return parser.parse_args(argv)


class _Run:
    """All rounds of a run."""

    def __init__(
        self, given: argparse.Namespace, rng: random.Random, hosts: Hosts | None, folder: Path
    ) -> None:
        self._given = given
        self._rng = rng
        self._hosts = hosts
        self._folder = folder
        self._token_file = folder / "token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(secrets.token_hex(16))
        os.environ["DISTCOLLECT_TOKEN_FILE"] = str(self._token_file)
        self.failures: list[str] = []
        self._checker = Checker(self.failures)
        of_injuries = random.Random(rng.random())
        self._injuries = Injuries(of_injuries, hosts, self._checker, given.every)
        self._marked = Marked()
        os.environ.update([self._marked.variable])
        self._joiners = Joiners(hosts, folder, self._token_file)
        self._ledgers: list[tuple[str, LedgerReport]] = []
        self._num_pushes = 0

    def all_rounds(self, seconds: float) -> list[str]:
        """Collect for ``seconds``; return the failed checks."""
        end = time.monotonic() + seconds
        number = 0
        sync = bool(self._given.sync)
        try:
            while (left := end - time.monotonic()) > 0 and len(self.failures) < 10:
                # A short rest is added to the last round instead of making a round of its own.
                self._round(
                    number, sync, left if left < 1.5 * self._given.round else self._given.round
                )
                number += 1
                sync = not sync if self._given.sync is None else sync
        finally:
            self._marked.kill()
        return self.failures

    def _round(self, number: int, sync: bool, seconds: float) -> None:
        num_envs = self._rng.choice([1, 2, 3])
        plan = Plan(sync, self._given.workers, num_envs, self._rng.choice([20, 50]))
        missing = self._rng.choice(["survivors", "replacement"])
        faults = replace(_FAULTS, missing_share=missing)
        folder = self._folder / f"round-{number}"
        folder.mkdir()
        here = "127.0.0.1" if self._hosts is None else self._hosts.address
        address = f"{here}:{_free_port(here)}"
        mode = f"sync, share of missing: {faults.missing_share}" if sync else "async"
        print(f"round {number}: {mode}, {num_envs} envs, T = {plan.num_steps}", flush=True)
        servers = None
        if self._given.inference:
            servers = self._folder / f"servers-{number}"
            servers.mkdir()
        policy = Marking(servers)
        collector = dc.RPCDataCollector(
            Maker(folder, pause_s=0.002),
            policy,
            frames_per_batch=plan.frames_per_batch,
            num_workers=plan.num_workers,
            envs_per_worker=num_envs,
            sync=sync,
            faults=faults,
            listen=address,
            transport=self._given.transport,
            inference=dc.Inference("worker" if servers is None else "host"),
        )
        self._checker.begin(plan)
        self._injuries.begin(collector, faults, folder, self._joiners, address, servers=servers)
        try:
            for host in (0,) if self._hosts is None else _HOSTS:
                self._joiners.start(host, address)
            self._collect(collector, policy, seconds)
        finally:
            self._injuries.stop()
            begin = time.monotonic()
            collector.shutdown()
            took_s = time.monotonic() - begin
        # At most twice the grace period, and the time torch's agent and processes take to end.
        if took_s > 4 * faults.stop_timeout_s:
            self._checker.fail(f"shutdown took {took_s:.1f} s")
        self._end_round(collector, mode)

    def _collect(self, collector: dc.RPCDataCollector, policy: Marking, seconds: float) -> None:
        """Collect until the time is over; any error ends the round, and is a failure.

        No error is expected: worker 0 is never told to leave and may be replaced without limit,
        and no env raises too often in a row.
        """
        end = time.monotonic() + seconds
        owed: dict[int, int] = {}
        noted_at = 0.0
        while (now := time.monotonic()) < end:
            if self._rng.random() < 0.3:
                self._push(collector, policy, owed)
            try:
                batch = collector.next()
            except dc.DistCollectError as error:
                self._checker.fail(f"next() raised {error!r}")
                return
            self._checker.see(batch, time.monotonic(), collector.policy_version, owed)
            if now - noted_at > 5:
                self._marked.note()
                noted_at = now

    def _push(self, collector: dc.RPCDataCollector, policy: Marking, owed: dict[int, int]) -> None:
        version = collector.policy_version + 1
        policy.become(version)
        states = collector.worker_states
        present = [worker_id for worker_id, state in states.items() if state in PRESENT]
        selected = None
        # The workers of an inference server get weights together.
        if self._rng.random() < 0.7 and present and not self._given.inference:
            selected = self._rng.sample(present, self._rng.randint(1, len(present)))
        wait = self._rng.random() < 0.1
        try:
            handle = collector.update_policy_weights_(policy, worker_ids=selected, wait=False)
        except dc.ArgumentError:
            # The selected workers were given up meanwhile; nothing was published.
            if selected is None or collector.policy_version != version - 1:
                raise
            return
        self._num_pushes += 1
        assert handle is not None
        if handle.version != version:
            self._checker.fail(f"version {handle.version} was published instead of {version}")
        owed.update(dict.fromkeys(present if selected is None else handle.worker_ids, version))
        if wait:
            try:
                handle.wait(_PUSH_WAIT_S)
            except dc.WeightsTimeout:
                pass  # a worker hangs
            except dc.WorkerError:
                # Expected if all selected workers are faulty.
                if not set(handle.left_out) >= set(handle.worker_ids):
                    raise

    def _end_round(self, collector: dc.RPCDataCollector, mode: str) -> None:
        deaths, vanished = self._injuries.end()
        for wrong in self._joiners.end_round(_JOINED_TIMEOUT_S):
            self._checker.fail(wrong)
        deadline = time.monotonic() + _SETTLE_S
        while self._marked.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        if left := [*self._marked.left(), *self._files_of_hosts()]:
            self._checker.fail(f"left behind: {left}")
            self._marked.kill()
        report = collector.ledger
        self._ledgers.append((mode, report))
        records = self._injuries.records()
        for record in records:
            record.detach()
        self._checker.check_ledger(report, records, deaths, vanished)

    def _files_of_hosts(self) -> list[str]:
        """The files in the shared memory of the other hosts."""
        if self._hosts is None:
            return []
        variables, found = {**os.environ, **self._hosts.env}, []
        for host in _HOSTS:
            command = [*self._hosts.on(host), "ls", "/dev/shm"]
            listing = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, text=True, check=True
            )
            found += [f"{name} on host {host}" for name in listing.stdout.split()]
        return found

    def tell(self) -> None:
        """Print the report of the whole run."""
        for number, (mode, report) in enumerate(self._ledgers):
            print(f"\nround {number} ({mode})\n{report}")
        print(f"\n{self._num_pushes} versions were published")


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
