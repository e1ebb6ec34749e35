"""A simulated run of the pool; events of workers and transport come in random order."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from helpers.loopback_transport import pass_on

from distcollect.config import Staleness
from distcollect.errors import BatchTimeout, DeadlineError, DistCollectError, WorkerLost
from distcollect.pool.pool import Pool
from distcollect.pool.requests import origin
from distcollect.pool.worker_slots import BatchPlan
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, Deliver, Offer
from distcollect.transport.worker_service import WorkerService
from distcollect.weights.push_handle import PushHandle

FRAMES = 4
FLAT = torch.zeros(16, dtype=torch.uint8)


def taken(pool: Pool, timeout_s: float) -> list[Rollout]:
    """The rollouts of the next batch, which the user has then."""
    requests = pool.get(timeout_s)
    pool.delivered(requests, ())
    return [request.take_rollout() for request in requests]


class RolloutRequest:
    """A rollout requested from a simulated process; it serves as its own offer."""

    def __init__(self, process: Process, answer: Future[Offer]) -> None:
        self.process = process
        self.number = len(process.request)
        self.answer = answer
        self.batch = process.run.batch
        self.seeds = process.run.seeds
        self.version = process.held  # at the time of the request
        self.fetched: Future[Tensors] | None = None
        self.declined = False
        self.read = False  # its slab may be written again
        self.header: Header
        self.keeping: Future[None] | None = None
        self.outcome: Future[bool] | None = None  # whether another trainer has taken it
        self.refused = False
        self.referred = False

    @property
    def key(self) -> tuple[int, int, int]:
        return (*self.process.key, self.number)

    def fetch(self, deliver: Deliver) -> None:
        assert self.fetched is None, "fetched twice"
        assert not self.declined, "fetched after it was declined"
        if self.process.peer == self.process.run.evicted:
            self.fetched = self.process.run.lost()
        else:
            self.fetched = Future()
            if self.process.run.rng.random() < self.process.run.inline:
                self.arrive()  # it was sent with its header
        pass_on(self.fetched, deliver)

    def arrive(self) -> None:
        assert self.fetched is not None
        self.read = True
        self.fetched.set_result([])

    def decline(self) -> None:
        assert self.fetched is None or self.fetched.done(), "declined while it is fetched"
        self.declined = self.read = True

    def keep(self) -> Future[None]:
        """The worker is asked to keep the rollout for another trainer."""
        assert self.keeping is None, "handed over twice"
        assert self.fetched is None, "handed over after it was fetched"
        self.read = False
        self.keeping = Future()
        return self.keeping

    def settle(self) -> None:
        """The other trainer takes it, or does not."""
        assert self.outcome is not None
        run = self.process.run
        taken = self.referred and not self.refused and run.rng.random() < 0.7
        self.read = True
        run.counts["taken" if taken else "not taken"] += 1
        if taken:
            run.check_rollout(self.header, was_handed_over=True)
        self.outcome.set_result(taken)


class Process:
    """A simulated worker process."""

    def __init__(self, run: Run, worker_id: int, incarnation: int) -> None:
        self.run = run
        self.key = (worker_id, incarnation)
        run.num_peers += 1
        self.peer = run.num_peers
        self.request: list[RolloutRequest] = []
        self.seeding: Future[None] | None = None
        self.seeded = True
        self.held = 0  # its version
        self.pending = 0  # a version being sent to it
        self.stepped = 0
        self.lost: Counter[str] = Counter()
        self.kept: dict[str, RolloutRequest] = {}
        self.told_to_leave = False
        self.retiring = False
        self.drained = False
        self.doomed = False  # it failed, and will be lost because of that

    @property
    def collecting(self) -> RolloutRequest | None:
        last = self.request[-1] if self.request else None
        return None if last is None or last.answer.done() else last


class Run:
    """Transport, weight sender, failure sink and workers of one pool, driven at random."""

    def __init__(
        self,
        seed: int,
        plan: BatchPlan,
        *,
        staleness: Staleness | None = None,
        num_workers: int = 2,
        faults: float = 0.0,
        inline: float = 0.3,
        hands: float = 0.0,
    ) -> None:
        self.rng = random.Random(seed)
        self.about = f"seed {seed}, {plan}, {staleness}, {num_workers} workers"
        self.plan = plan
        self.staleness = staleness
        self.faults = faults
        self.inline = inline  # this share of rollouts is sent with its header
        self.hands = hands  # this share of rollouts is handed over to another trainer
        self.num_workers = num_workers
        self.now = 0.0  # seconds since the start
        self.num_peers = 0
        self.batch = self.batches = self.seeds = self.num_events = 0
        self.deadline = 0.0
        self.given_up: set[int] = set()
        self.evicted = 0  # peer of the process that is being evicted
        self.present: dict[int, Process] = {}
        self.by_peer: dict[int, Process] = {}
        self.coming: dict[int, int] = {}  # worker_id to the next incarnation
        self.next_incarnation: Counter[int] = Counter()
        self.unaccounted: list[tuple[Process, str, int | None]] = []
        self.offers: dict[tuple[int, int, int], RolloutRequest] = {}
        self.counts: Counter[str] = Counter()
        self.seen: set[tuple[int, int, int]] = set()
        self.delivered: Counter[int] = Counter()
        self.stepped = self.hidden = 0
        self.sent: dict[int, set[int]] = defaultdict(set)
        self.newest: dict[int, int] = {}
        self.has: dict[int, int] = {}
        self.on_acknowledged: Any = None
        self.on_left_out: Any = None
        self.pool = Pool(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            plan,
            failure_sink=self,
            staleness=staleness,
            wait=self.wait,
        )
        for worker_id in range(num_workers):
            self.join(worker_id)

    # The transport.

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        if peer == self.evicted:
            pass_on(self.lost(), deliver)
            return
        process = self.by_peer[peer]
        worker_id = process.key[0]
        about = f"{process.key}: {self.about}"
        assert self.present.get(worker_id) is process, f"asked, but gone {about}"
        assert not process.told_to_leave, f"asked, but leaving {about}"
        assert process.seeded, f"asked, but not seeded {about}"
        assert process.collecting is None, f"asked twice {about}"
        unread = [request for request in process.request[-2 * NUM_SLABS :] if not request.read]
        assert len(process.request) - min((a.number for a in unread), default=9**9) < NUM_SLABS, (
            about
        )
        assert request.fresh == self.plan.sync
        newest = self.newest.get(worker_id, 0)
        if self.plan.sync:
            assert not unread, about
            assert self.has[worker_id] == newest, f"collects with old weights {about}"
        elif not process.request:
            assert self.has[worker_id] == newest, f"begins with old weights {about}"
        request = RolloutRequest(process, Future())
        process.request.append(request)
        pass_on(request.answer, deliver)

    def lost(self) -> Future[Any]:
        """The answer of a process that was evicted, and that the pool has yet to lose."""
        answer: Future[Any] = Future()
        answer.set_exception(WorkerLost("it is gone"))
        return answer

    def hand_over(self, peer: int, sequence: int, key: str, keep_s: float) -> Future[Any]:
        return self.call(peer, WorkerService.hand_over, sequence, key, keep_s)

    def call(self, peer: int, method: Any, *args: Any) -> Future[Any]:
        if peer == self.evicted:
            return self.lost()
        process = self.by_peer[peer]
        assert self.present.get(process.key[0]) is process, (
            f"{method.__name__} to who is gone: {self.about}"
        )
        answer: Future[Any] = Future()
        if method is WorkerService.seed:
            assert process.seeding is None, f"called twice: {self.about}"
            assert process.collecting is None, f"seeded in a rollout: {self.about}"
            process.seeding, process.seeded = answer, False
        elif method is WorkerService.hand_over:
            number, key, _ = args
            request = process.request[number]
            self.check_lag(request.header)
            process.kept[key] = request
            return request.keep()
        elif method is WorkerService.handover_outcome:
            process.kept[args[0]].outcome = answer
        elif method is WorkerService.cancel_handover:
            process.kept[args[0]].refused |= self.rng.random() < 0.7  # else: taken before
        elif method is WorkerService.place:
            answer.set_result("the simulation")
        else:
            assert method is WorkerService.preempt
            assert process.collecting is not None or process.doomed
            self.counts["preempted"] += 1
            answer.set_result(None)
        return answer

    # The sender.

    def acknowledged(self, worker_id: int) -> int:
        return self.has.get(worker_id, 0)

    def is_coming(self, worker_id: int) -> bool:
        process = self.present.get(worker_id)
        return process is not None and process.pending != 0

    def publish(
        self, flat: torch.Tensor, version: int, worker_ids: Any, *, apart: bool
    ) -> PushHandle:
        for worker_id in worker_ids:
            self.newest[worker_id] = version
            self.sent[worker_id].add(version)
            if worker_id in self.present:
                self.present[worker_id].pending = version
        return PushHandle(version, worker_ids, 1.0)

    def welcome(self, worker_id: int, peer: int) -> int:
        version = self.newest.get(worker_id) or max(self.newest.values(), default=0)
        self.has[worker_id] = 0
        if version:
            self.newest[worker_id] = version
            self.sent[worker_id].add(version)
        self.by_peer[peer].pending = version
        return version

    def forget(self, worker_id: int, *, replaced: bool) -> None:
        self.has.pop(worker_id, None)

    def expect_nobody(self) -> None: ...

    def close(self) -> None: ...

    # The reports.

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        process = self.present[worker_id]
        assert process.key == (worker_id, incarnation)
        process.doomed = True

    def drained(self, worker_id: int, incarnation: int) -> None:
        process = self.present[worker_id]
        about = f"{process.key}: {self.about}"
        assert process.key == (worker_id, incarnation)
        assert process.told_to_leave, about
        assert not process.drained, f"drained twice {about}"
        assert all(request.read for request in process.request[-5:]), f"it owes something {about}"
        process.drained = True
        self.counts["drained"] += 1

    # How the user's thread waits.

    def wait(self, _: object, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Let random events happen until ``is_done()``."""
        begin = self.now
        while not is_done():
            assert self.happen(), f"stalls in batch {self.batch}: {self.about}"
            if self.now >= min(self.deadline, begin + timeout_s):
                break
            if self.rng.random() < self.faults / 50:
                self.counts["interrupted"] += 1
                raise KeyboardInterrupt
        return is_done()

    # Random events.

    def due(self) -> list[Callable[[], None]]:
        """Events that will happen sooner or later."""
        due: list[Callable[[], None]] = []
        for process in self.present.values():
            due += self.due_of(process)
        due += [partial(self.join, worker_id) for worker_id in self.coming]
        due += [partial(self.account, *entry) for entry in self.unaccounted]
        return due

    def due_of(self, process: Process) -> list[Callable[[], None]]:
        if process.doomed:
            return [lambda: self.die(process)]
        if process.drained:
            return [lambda: self.end(process)]
        due: list[Callable[[], None]] = [
            request.arrive
            for request in process.request[-5:]
            if request.fetched is not None and not request.fetched.done()
        ]
        for request in process.request[-5:]:
            if request.keeping is not None and not request.keeping.done():
                due.append(partial(request.keeping.set_result, None))
            elif request.outcome is not None and not request.outcome.done():
                due.append(request.settle)
        if process.collecting is not None:
            due.append(lambda: self.answer(process))
        if process.pending:
            due.append(lambda: self.acknowledge(process))
        if process.seeding is not None:
            due.append(lambda: self.seeded(process))
        return due

    def happen(self) -> bool:
        """Let one random event happen; False if none is possible."""
        self.num_events += 1
        self.now += self.rng.expovariate(10)
        if self.rng.random() < self.faults:
            self.fault()
        else:
            due = self.due()
            if not due:
                return False
            self.rng.choice(due)()
        if self.num_events % 7 == 0:
            self.check_ledger()
        return True

    def answer(self, process: Process) -> None:
        request = process.collecting
        assert request is not None
        lost = self.rng.choice([0, 0, 0, 0, 2])
        if lost:
            process.lost["env_failed"] += lost
        process.stepped += FRAMES + lost
        self.stepped += FRAMES + lost
        lowest = self.rng.choice([request.version, process.held])
        request.header = Header(
            *process.key,
            request.number,
            FRAMES,
            FRAMES,
            0,
            (lowest, process.held),
            process.stepped,
            tuple(process.lost.items()),
        )
        self.offers[request.key] = request
        request.answer.set_result(request)

    def acknowledge(self, process: Process) -> None:
        if process.held != process.pending and self.rng.random() < 0.5:
            process.held = process.pending  # it has the version, but the sender never learns that
            return
        process.held, process.pending = process.pending, 0
        self.has[process.key[0]] = process.held
        self.on_acknowledged(process.key[0], process.held)

    def seeded(self, process: Process) -> None:
        assert process.seeding is not None
        process.seeding, answer = None, process.seeding
        process.seeded = True
        answer.set_result(None)

    def join(self, worker_id: int) -> None:
        self.coming.pop(worker_id, None)
        process = Process(self, worker_id, self.next_incarnation[worker_id])
        self.next_incarnation[worker_id] += 1
        self.present[worker_id] = self.by_peer[process.peer] = process
        self.counts["joined"] += 1
        self.pool.join(*process.key, process.peer)

    def leave(self, process: Process, *, retiring: bool = False) -> None:
        process.retiring = retiring
        process.told_to_leave = True
        self.counts["leavers"] += 1
        self.pool.leave(*process.key)

    def end(self, process: Process) -> None:
        """A process without open requests ends."""
        assert process.drained
        self.lose(process, "left", replaced=process.retiring)

    def die(self, process: Process) -> None:
        """The process ends in the middle of what it does."""
        self.counts["died"] += 1
        if process.collecting is not None:
            stepped = self.rng.randrange(FRAMES)
            process.stepped += stepped
            self.stepped += stepped
            self.counts["died collecting"] += 1
        if self.rng.random() < 0.5 and process.told_to_leave and not process.retiring:
            self.counts["died leaving"] += 1
        self.lose(process, "worker_lost", replaced=process.retiring or not process.told_to_leave)

    def lose(self, process: Process, cause: str, *, replaced: bool) -> None:
        worker_id, _ = process.key
        del self.by_peer[process.peer]
        if self.rng.random() < 0.5:
            self.evicted = process.peer
            self.evict(process)
            self.evicted = 0
            del self.present[worker_id]
            self.pool.lose(*process.key, replaced=replaced)
        else:
            del self.present[worker_id]
            self.pool.lose(*process.key, replaced=replaced)
            self.evict(process)
        if replaced:
            self.coming[worker_id] = self.next_incarnation[worker_id]
        self.unaccounted.append(
            (process, cause, None if self.rng.random() < 0.2 else process.stepped)
        )

    def evict(self, process: Process) -> None:
        """Fail all its open requests."""
        for request in process.request[-5:]:
            answers: tuple[Future[Any] | None, ...]
            answers = (request.answer, request.fetched, request.keeping, request.outcome)
            for owed in answers:
                if owed is not None and not owed.done():
                    self.counts["died while fetched"] += owed is request.fetched
                    self.counts["died while kept"] += owed is request.outcome
                    owed.set_exception(WorkerLost("it is gone"))
        if process.seeding is not None:
            process.seeding.set_exception(WorkerLost("it is gone"))

    def account(self, process: Process, cause: str, stepped: int | None) -> None:
        self.unaccounted.remove((process, cause, stepped))
        known = next((a.header.stepped for a in process.request[::-1] if hasattr(a, "header")), 0)
        if stepped is None:
            self.hidden += process.stepped - known
        self.pool.account(*process.key, cause, stepped)

    # Faults.

    def fault(self) -> None:
        self.rng.choice(
            [self.kill, self.kill, self.break_off, self.tell_to_leave, self.give_up, self.grow]
            + ([] if self.plan.sync else [self.push])
        )()

    def num_hopeful(self) -> int:
        staying = (p for p in self.present.values() if p.retiring or not p.told_to_leave)
        return len(list(staying)) + len(self.coming)

    def some(self) -> Process | None:
        return self.rng.choice(list(self.present.values())) if self.present else None

    def kill(self) -> None:
        if (process := self.some()) is not None:
            self.die(process)

    def break_off(self) -> None:
        """A worker fails a request, and is replaced."""
        process = self.some()
        if process is None or process.doomed:
            return
        owed = [
            *(request.fetched for request in process.request[-5:]),
            *(request.outcome for request in process.request[-5:]),
            process.collecting and process.collecting.answer,
        ]
        still_owed = [answer for answer in owed if answer is not None and not answer.done()]
        if still_owed:
            self.counts["failed"] += 1
            self.rng.choice(still_owed).set_exception(DistCollectError("it can't"))

    def tell_to_leave(self) -> None:
        process = self.some()
        if process is None or process.doomed:
            return
        if process.told_to_leave:
            self.pool.leave(*process.key)  # reported twice
        elif self.num_hopeful() > 1:
            self.leave(process, retiring=self.rng.random() < 0.5)

    def give_up(self) -> None:
        """A slot that waits for its next process is given up."""
        if self.coming and self.num_hopeful() > 1:
            worker_id = self.rng.choice(list(self.coming))
            incarnation = self.coming.pop(worker_id)
            self.next_incarnation[worker_id] += 1
            self.counts["given up"] += 1
            self.pool.lose(worker_id, incarnation, replaced=False)
            self.pool.account(worker_id, incarnation, "worker_lost", 0)

    def grow(self) -> None:
        """A worker joins in an empty slot."""
        taken = self.present.keys() | self.coming.keys()
        free = [w for w in range(2 * self.num_workers) if w not in taken]
        if len(taken) < self.num_workers + 2 and free:
            self.join(self.rng.choice(free))

    def push(self) -> None:
        workers = self.pool.worker_ids
        if self.rng.random() < 0.2 and workers:
            self.pool.push(FLAT, self.rng.sample(workers, self.rng.randint(1, len(workers))))
        else:
            self.pool.push(FLAT)

    # The user.

    def gather(self, timeout_s: float = 1e6) -> list[Rollout]:
        self.batch += 1
        self.deadline = self.now + timeout_s
        if self.rng.random() < self.hands:
            self.refer(timeout_s)
            return []
        rollouts = taken(self.pool, timeout_s)
        if self.plan.sync:
            self.check_batch(rollouts)
        for rollout in rollouts:
            self.check_rollout(rollout.header)
        return rollouts

    def refer(self, timeout_s: float) -> None:
        request = self.pool.hand_over(timeout_s, 60)
        offer = self.offers[origin(request.known_header)]
        if request.tensors is not None:
            assert not offer.keeping
            self.counts["sent along"] += 1
            self.check_rollout(request.known_header)
        else:
            offer.referred = True

    def check_batch(self, rollouts: list[Rollout]) -> None:
        keys = [origin(rollout.header) for rollout in rollouts]
        assert len(keys) == self.plan.num_rollouts, self.about
        assert keys == sorted(keys), self.about

    def check_rollout(self, header: Header, *, was_handed_over: bool = False) -> None:
        key = (header.worker_id, header.incarnation, header.sequence)
        assert key not in self.seen, f"{key} twice: {self.about}"
        self.seen.add(key)
        self.delivered[header.worker_id] += header.num_frames
        request = self.offers.pop(key)
        if was_handed_over:
            return
        self.check_lag(header)
        assert request.seeds == self.seeds, f"{key} is from before the seed: {self.about}"
        if self.plan.sync:
            assert request.batch == self.batch, f"{key} is from before the batch: {self.about}"

    def check_lag(self, header: Header) -> None:
        key = (header.worker_id, header.incarnation, header.sequence)
        if self.staleness is not None:
            lowest = header.policy_version[0]
            lag = sum(version > lowest for version in self.sent[header.worker_id])
            assert lag <= self.staleness.max_policy_lag, f"{key} lags {lag}: {self.about}"

    def check_ledger(self) -> None:
        report = self.pool.ledger
        for worker_id, frames in report.workers.items():
            settled = frames.delivered + sum(frames.lost.values())
            assert frames.stepped == settled + frames.open, self.about
            assert min(frames.delivered, frames.open, *frames.lost.values()) >= 0, self.about
            assert frames.delivered >= self.delivered[worker_id], self.about
        assert report.total.stepped <= self.stepped, self.about

    def run(self, num_batches: int) -> Run:
        while self.batches < num_batches:
            self.pause()
            try:
                self.gather(self.rng.choice([0.5, 1e6, 1e6, 1e6]))
                self.batches += 1
            except (BatchTimeout, KeyboardInterrupt) as error:
                self.counts["timed out"] += isinstance(error, BatchTimeout)
                if self.plan.sync:
                    self.given_up.add(self.batch)
            self.check_ledger()
        return self

    def pause(self) -> None:
        """Random acts of the user, and random events, between two batches."""
        for _ in range(self.rng.choice([0, 0, 1, 5])):
            self.happen()
        if self.rng.random() < 0.5:
            self.push()
        if self.rng.random() < 0.005:
            self.seed()

    def seed(self) -> None:
        self.seeds += 1
        timeout_s = self.rng.choice([0.2, 1e6])
        self.deadline = self.now + timeout_s
        try:
            self.pool.seed(self.seeds, static_seed=False, timeout_s=timeout_s)
            self.counts["seeded"] += 1
        except (DeadlineError, KeyboardInterrupt):
            self.counts["seeded late"] += 1

    def finish(self) -> None:
        """End the run, and check that every frame is accounted for."""
        total_frames = self.plan.num_frames
        if total_frames is not None:
            if not self.hands:
                assert sum(self.delivered.values()) == total_frames, self.about
            collecting = [p.collecting for p in self.present.values() if p.collecting]
            # A worker may still be at a rollout of a sync batch that the user gave up.
            assert all(r.batch in self.given_up for r in collecting), f"asked: {self.about}"
        self.faults = 0
        self.pool.close()
        for process in list(self.present.values()):
            if self.rng.random() < 0.5:
                self.evict(process)
            self.unaccounted.append((process, "shut_down", process.stepped))
        while self.unaccounted:
            self.account(*self.unaccounted[0])
        self.check_ledger()
        total = self.pool.ledger.total
        assert total.open == 0, f"{total}: {self.about}"
        assert total.delivered == sum(self.delivered.values()), self.about
        assert total.stepped == self.stepped - self.hidden, self.about
        assert self.hidden <= total.at_most, self.about
