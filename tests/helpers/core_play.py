"""The pool's decisions by themselves: a test says which event comes, and sees what is asked."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

from distcollect.config import Staleness
from distcollect.pool.event_loop import EventLoop
from distcollect.pool.pool_core import PoolCore
from distcollect.pool.staleness import SentVersions
from distcollect.pool.worker_slots import BatchPlan, Wanted
from distcollect.rollout.header import Header
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.protocol import Deliver, Transport
from distcollect.transport.worker_service import WorkerService

FRAMES = 4
SYNC = BatchPlan(sync=True, num_rollouts=2, num_envs=1, num_steps=FRAMES)


class Asked:
    """A rollout that a worker was asked for; it serves as its own offer."""

    def __init__(self, play: Play, peer: int, deliver: Deliver) -> None:
        self.play = play
        self.worker_id, self.incarnation = divmod(peer, 10)
        self.number = play.num_asked.get(peer, 0)
        play.num_asked[peer] = self.number + 1
        self.deliver = self.arrive = deliver
        self.declined = False

    def come(self, version: int) -> None:
        key = (self.worker_id, self.incarnation, self.number)
        stepped = (self.number + 1) * FRAMES
        self.header = Header(*key, FRAMES, FRAMES, 0, (version, version), stepped=stepped)
        self.deliver(self, None)

    def fetch(self, deliver: Deliver) -> None:
        self.arrive = deliver
        self.play.fetching.append(self)

    def decline(self) -> None:
        self.declined = True


class Play:
    """A pool's core, and workers that do nothing by themselves.

    Attributes:
        asked: worker_ids of the requests since they were taken last.
        open: the requests that were not answered.
        fetching: the rollouts that are on their way.
        delivered: worker_ids of each batch.
        preempted: worker_ids of the requests that are to end early.
        called: setup calls: worker_id, name of the method, arguments.
        answers: of the last setup call of each worker.
        left: worker_id and incarnation of those that left.
    """

    def __init__(
        self, plan: BatchPlan, num_workers: int, *, staleness: Staleness | None = None
    ) -> None:
        self.has: dict[int, int] = {}  # worker_id to the version that it has
        self.loop = EventLoop(self.fail, lambda: self.core.decide())  # noqa: PLW0108 - made below
        self.core = PoolCore(
            plan,
            staleness,
            SentVersions(lambda w: self.has.get(w, 0)),
            cast("Transport", self),
            failure_sink=self,
            stats_recorder=StatsRecorder(),
            post=self.loop.post,
            clock=lambda: 1,
            wake_user=self.wake_user,
        )
        self.num_asked: dict[int, int] = {}
        self.asked: list[int] = []
        self.open: list[Asked] = []
        self.fetching: list[Asked] = []
        self.delivered: list[list[int]] = []
        self.preempted: list[int] = []
        self.called: list[tuple[Any, ...]] = []
        self.left: list[tuple[int, int]] = []
        self.answers: dict[int, Future[None]] = {}
        self.wanted = Wanted.ALL if plan.sync else Wanted.NEXT
        for worker_id in range(num_workers):
            self.join(worker_id)

    # What is asked is noted; nothing comes of it until the test says so.

    def collect(self, peer: int, _: object, deliver: Deliver) -> None:
        self.open.append(Asked(self, peer, deliver))
        self.asked.append(peer // 10)

    def call(self, peer: int, method: Any, *args: Any) -> Future[None]:
        answer: Future[None] = Future()
        if method is WorkerService.preempt:
            self.preempted.append(peer // 10)
        else:
            self.answers[peer // 10] = answer
            self.called.append((peer // 10, method.__name__, *args))
        return answer

    def wake_user(self) -> None:
        if self.core.batch is not None:
            taken = self.core.take_batch() or ()
            self.delivered.append([request.worker_id for request in taken])

    def drained(self, worker_id: int, incarnation: int) -> None:
        self.left.append((worker_id, incarnation))

    def report(self, *_: object, **__: object) -> None: ...

    def fail(self, error: BaseException) -> None:
        raise error

    def take(self, noted: list[Any]) -> list[Any]:
        """What one of the lists has, which is empty then."""
        taken = noted.copy()
        noted.clear()
        return taken

    def take_asked(self) -> list[int]:
        """The workers that were asked since."""
        return self.take(self.asked)

    # Events.

    def want(self) -> list[int] | None:
        """The user asks for a batch; whose rollouts it gets, if they are there."""
        self.loop.do(self.core.batch_wanted, self.wanted)
        return self.delivered.pop() if self.delivered else None

    def join(self, worker_id: int, incarnation: int = 0) -> None:
        who = worker_id, incarnation, 10 * worker_id + incarnation
        self.loop.do(self.core.worker_joined, *who, 0)

    def lose(self, worker_id: int, *, replaced: bool) -> None:
        self.open = [request for request in self.open if request.worker_id != worker_id]
        self.loop.do(lambda: self.core.worker_lost(worker_id, 0, replaced=replaced))

    def leave(self, worker_id: int) -> None:
        self.loop.do(self.core.worker_leaving, worker_id, 0)

    def publish(self, version: int, worker_ids: list[int]) -> None:
        self.loop.do(self.core.published, version, worker_ids)

    def acknowledge(self, worker_id: int, version: int) -> None:
        self.has[worker_id] = version
        self.loop.do(self.core.acknowledged, worker_id)

    def finish(self, worker_id: int, version: int = 0) -> Asked:
        """A worker's oldest rollout lies on it."""
        asked = next(asked for asked in self.open if asked.worker_id == worker_id)
        self.open.remove(asked)
        asked.come(version)
        return asked

    def arrive(self) -> None:
        """All that is on its way arrives."""
        while self.fetching:
            self.fetching.pop(0).arrive([], None)

    def come(self, worker_id: int, version: int = 0) -> Asked:
        """A worker's oldest rollout lies on it, and arrives if it is fetched."""
        ready = self.finish(worker_id, version)
        self.arrive()
        return ready
