"""What the trainer's bookkeeping costs for each rollout, with 10 to 10,000 simulated workers.

The pool, its ledger, the sender of weights and the planning of processes are the real ones. The
workers are simulated in this process, answer at once, and move no data. So the bookkeeping is what
all threads of the process use, without what the simulation uses on its own thread. Waking these
threads is part of it, and takes longer than the bookkeeping itself where each rollout is a batch.
So the same is also measured on a single thread, which wakes nobody: that is the Python in it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from benchmarks.items import Values
from distcollect.config import Staleness, WeightSync
from distcollect.policy.weight_layout import WeightLayout
from distcollect.pool.policy_lag import VersionFrames
from distcollect.pool.pool import Pool
from distcollect.pool.worker_slots import BatchPlan
from distcollect.rollout.header import Header
from distcollect.roster.membership import Membership, Start
from distcollect.transport.protocol import CollectRequest, Deliver
from distcollect.transport.worker_service import WeightSource, WorkerService
from distcollect.weights.sender import WeightSender
from distcollect.weights.updaters import InlineSource, WeightUpdaterBase

_LIMIT_S = 120.0
_NUM_STEPS = 4
# How many rollouts are measured: enough for the cost of a batch not to depend on chance.
_NUM_ROLLOUTS = 20_000


def _done(value: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


@dataclass(slots=True)
class _Offer:
    """A simulated rollout, without data."""

    header: Header

    def fetch(self, deliver: Deliver) -> None:
        deliver([], None)

    def decline(self) -> None: ...


class _Simulation:
    """Transport and workers: whatever is requested is answered in order."""

    def __init__(self, *, has_thread: bool) -> None:
        """``has_thread``: a thread answers; False: the thread that requests does."""
        self._has_thread = has_thread
        self._open: queue.SimpleQueue[tuple[int, CollectRequest, Deliver]] = queue.SimpleQueue()
        self._num_rollouts: dict[int, int] = {}
        self.workers: dict[int, tuple[int, int]] = {}  # worker_id and incarnation, by peer
        self._answering_s = 0.0  # of CPU, in what the pool does with the answers
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open.put((-1, CollectRequest(0), lambda *_: None))
        self._thread.join(_LIMIT_S)

    def _answer_all(self) -> None:
        while True:
            peer, request, deliver = self._open.get()
            if peer < 0:
                return
            offer = self._rollout(peer, self.workers[peer], request)
            begin = time.thread_time()
            deliver(offer, None)
            self._answering_s += time.thread_time() - begin

    def _rollout(self, peer: int, worker: tuple[int, int], request: CollectRequest) -> _Offer:
        sequence = self._num_rollouts.get(peer, 0)
        self._num_rollouts[peer] = sequence + 1
        version = request.version
        frames = _NUM_STEPS
        stepped = frames * (sequence + 1)
        header = Header(*worker, sequence, frames, frames, 0, (version, version), stepped)
        return _Offer(header)

    def used_s(self) -> float:
        """Seconds of CPU that the simulation took until now, without what the pool did in it."""
        assert self._thread.ident is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        return time.clock_gettime(clock) - self._answering_s

    # The transport.

    def collect(self, peer: int, request: CollectRequest, deliver: Deliver) -> None:
        if self._has_thread:
            self._open.put((peer, request, deliver))
        else:
            deliver(self._rollout(peer, self.workers[peer], request), None)

    def call(self, peer: int, method: Any, *args: Any) -> Future[Any]:
        return _done(args[0].version if method is WorkerService.receive_weights else None)

    def ping(self, peer: int) -> Future[Any]:
        return _done(None)

    # What the pool reports.

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None: ...

    def drained(self, worker_id: int, incarnation: int) -> None: ...


class _Updater(WeightUpdaterBase):
    """Moves nothing."""

    def sources(
        self, payload: torch.Tensor, peers: Mapping[int, int]
    ) -> Mapping[int, WeightSource]:
        return dict.fromkeys(peers, InlineSource(payload))


class SimulatedRun:
    """A pool with simulated workers."""

    def __init__(
        self,
        num_workers: int,
        *,
        sync: bool,
        staleness: Staleness | None = None,
        has_threads: bool = True,
        **plan: Any,
    ) -> None:
        self.is_sync = sync
        self.simulation = cast("Any", _Simulation(has_thread=has_threads))
        self.layout = WeightLayout.of(nn.Linear(64, 64))
        self.sender = WeightSender(
            self.simulation, self.layout, _Updater(), options=WeightSync(), timeout_s=_LIMIT_S
        )
        self.pool = Pool(
            self.simulation,
            self.sender,
            BatchPlan(sync, num_workers if sync else 1, 1, _NUM_STEPS, **plan),
            failure_sink=self.simulation,
            staleness=staleness,
        )
        self._peers = itertools.count(1)
        for worker_id in range(num_workers):
            self.join(worker_id, 0)

    def join(self, worker_id: int, incarnation: int) -> None:
        peer = next(self._peers)
        self.simulation.workers[peer] = worker_id, incarnation
        self.pool.join(worker_id, incarnation, peer)

    def collect(self, num_batches: int) -> None:
        """Get batches as a collector does."""
        for _ in range(num_batches):
            batch = self.pool.get(_LIMIT_S)
            counts = [VersionFrames(0, 0, 0, _NUM_STEPS, is_masked=False)] * len(batch)
            self.pool.delivered(batch, counts)
            del batch

    def close(self) -> None:
        self.pool.close()
        self.simulation.close()


MODES: dict[str, dict[str, Any]] = {
    "sync": {"sync": True},
    "async": {"sync": False},
    "paced": {"sync": False, "staleness": Staleness(4, "pace")},
    "in turn": {"sync": False, "in_turn": True},
}


def run_rollouts(_seconds: float, *, mode: str, num_workers: int) -> Values:
    """Bookkeeping of rollouts: CPU microseconds "us_per_rollout" and milliseconds "ms_per_batch".

    "us_of_python" is the first without threads that wake each other.

    Args:
        mode: "sync", "async", "paced" or "in turn".
        num_workers: W.
    """
    us_of_python, _ = _measured(mode, num_workers, has_threads=False)
    us_per_rollout, ms_per_batch = _measured(mode, num_workers, has_threads=True)
    return {
        "us_per_rollout": us_per_rollout,
        "us_of_python": us_of_python,
        "ms_per_batch": ms_per_batch,
    }


def _measured(mode: str, num_workers: int, *, has_threads: bool) -> tuple[float, float]:
    """Microseconds for each rollout, and milliseconds for each batch."""
    run = SimulatedRun(num_workers, has_threads=has_threads, **MODES[mode])
    per_batch = num_workers if run.is_sync else 1
    num_batches = max(2, _NUM_ROLLOUTS // per_batch)
    run.collect(max(1, num_batches // 10))
    begin, begin_of_simulation = time.process_time(), run.simulation.used_s()
    run.collect(num_batches)
    used_s = time.process_time() - begin
    used_s -= run.simulation.used_s() - begin_of_simulation
    run.close()
    return used_s / num_batches / per_batch * 1e6, used_s / num_batches * 1e3


def run_joins(_seconds: float, *, num_workers: int) -> Values:
    """Plan the start of W processes, and have them join: CPU seconds "joined_s"."""
    run = SimulatedRun(0, sync=False)
    membership = Membership(60.0, 60.0, 10)
    begin = time.process_time()
    for worker_id in range(num_workers):
        membership.open(worker_id, 0.0)
    for command in membership.tick(0.0):
        assert isinstance(command, Start)
        membership.ready(command.worker_id, command.incarnation, 0.0)
        run.join(command.worker_id, command.incarnation)
    used_s = time.process_time() - begin
    assert run.pool.worker_ids == tuple(range(num_workers))
    run.close()
    return {"joined_s": used_s}


def run_pushes(_seconds: float, *, num_workers: int) -> Values:
    """100 pushes to random halves of W workers: CPU milliseconds "ms_per_push"."""
    run = SimulatedRun(num_workers, sync=False)
    rng = np.random.default_rng(0)
    newest = dict.fromkeys(range(num_workers), 0)
    begin = time.process_time()
    for version in range(1, 101):
        half = np.sort(rng.choice(num_workers, num_workers // 2, replace=False)).tolist()
        newest.update(dict.fromkeys(half, version))
        run.pool.push(run.layout.empty(), half).wait(_LIMIT_S)
    used_s = time.process_time() - begin
    assert run.pool.acknowledged == newest
    run.close()
    return {"ms_per_push": used_s * 10}
