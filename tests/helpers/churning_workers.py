"""Workers on threads of this process that die, leave and join while a collector uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from helpers.loopback_pool import LoopbackWorkers, new_worker

import distcollect as dc
from distcollect.collectors import with_workers
from distcollect.common.peer_ids import identity
from distcollect.common.threads import SerialThread
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import WorkerLost
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.transport.worker_service import WorkerService


class ChurningWorkers(LoopbackWorkers):
    """As :class:`LoopbackWorkers`; a thread in place of the supervision replaces dead workers."""

    def __init__(
        self,
        num_workers: int,
        faults: Faults,
        plan_for: Callable[[int], PickledPlan],
        **_: object,
    ) -> None:
        self._plan_for = plan_for
        self._supervision = SerialThread("supervision")
        self.incarnations = dict.fromkeys(range(num_workers), 0)
        super().__init__(num_workers, faults, plan_for)
        self._thread_of = dict(enumerate(self._threads))

    def attach(self, observer: MembershipObserver) -> None:
        self._supervision.submit(super().attach, observer).result(60)

    def await_enough(self) -> None:
        """Who died is replaced, at most a moment later."""

    def settle(self) -> None:
        """Wait until all that was asked for before has happened."""
        self._supervision.submit(lambda: None).result(60)

    def kill(self, worker_id: int, *, replaced: bool = True) -> None:
        """The worker dies soon."""
        incarnation = self.incarnations[worker_id]
        self._supervision.submit(self._lose, worker_id, incarnation, "worker_lost", replaced)

    def leave(self, worker_id: int) -> None:
        """The worker is preempted soon: it delivers what it has, and leaves."""
        incarnation = self.incarnations[worker_id]
        self._supervision.submit(lambda: self.observer.leave(worker_id, incarnation))

    def grow(self, worker_id: int) -> None:
        """A worker joins soon."""
        self.incarnations[worker_id] = self.incarnations.get(worker_id, -1) + 1
        self._supervision.submit(self._join, worker_id, self.incarnations[worker_id])

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        if isinstance(error, WorkerLost):  # else it is a fault of the package
            self._supervision.submit(self._lose, worker_id, incarnation, "worker_lost", True)
        else:
            self.observer.fail(error)

    def drained(self, worker_id: int, incarnation: int) -> None:
        self._supervision.submit(self._lose, worker_id, incarnation, "left", False)

    def _lose(self, worker_id: int, incarnation: int, cause: str, replaced: bool) -> None:
        if self.incarnations[worker_id] != incarnation or worker_id not in self.services:
            return
        worker = self.services.pop(worker_id)
        self.transport.disconnect(self.peers.pop(worker_id))
        self.num_present -= 1
        self.states[worker_id] = WorkerState.LOST
        self.observer.lose(worker_id, incarnation, replaced=replaced)
        worker.stop()
        self._thread_of[worker_id].join(60)
        self.observer.account(worker_id, incarnation, cause, worker.counter.stepped)
        if replaced:
            self.incarnations[worker_id] += 1
            self._join(worker_id, self.incarnations[worker_id])

    def _join(self, worker_id: int, incarnation: int) -> None:
        peer = identity().new_peer()
        worker = new_worker(worker_id, incarnation, peer=peer)
        thread = threading.Thread(target=worker.run, name=f"worker {worker_id}", daemon=True)
        self.transport.connect(peer, worker)
        thread.start()
        self._threads.append(thread)
        self._thread_of[worker_id] = thread
        for part in self._plan_for(worker_id):
            self.transport.call(peer, WorkerService.receive_part, part).result(60)
        probe = self.transport.call(peer, WorkerService.configure).result(60)
        self.gpus[worker_id] = probe.gpu
        self.services[worker_id], self.peers[worker_id] = worker, peer
        self.num_present += 1
        self.states[worker_id] = WorkerState.READY
        self.observer.join(worker_id, incarnation, peer)

    def close(self) -> None:
        self.settle()
        services = dict(self.services)
        super().close()
        for worker_id, worker in services.items():
            stepped = worker.counter.stepped
            self.observer.account(worker_id, self.incarnations[worker_id], "shut_down", stepped)
        self._supervision.close()


def churning_collector(*args: Any, **kwargs: Any) -> dc.RPCDataCollector:
    """An RPCDataCollector whose workers are :class:`ChurningWorkers`."""
    with patch.object(with_workers, "Workers", ChurningWorkers):
        return dc.RPCDataCollector(*args, **kwargs)
