"""Workers on threads of this process that die, leave and join while a collector uses them.

So does their inference server, if they have one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

from helpers.loopback_pool import SOON_S, LoopbackWorkers

import distcollect as dc
from distcollect.collectors import with_workers
from distcollect.common.threads import SerialThread
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import FIRST_SERVER, WorkerLost, is_server
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.transport.worker_service import WorkerInfo, WorkerService


class ChurningWorkers(LoopbackWorkers):
    """As :class:`LoopbackWorkers`; a thread in place of the supervision replaces dead workers."""

    def __init__(
        self,
        num_workers: int,
        faults: Faults,
        plan_for: Callable[[int], PickledPlan],
        server_ranks: Collection[int] | None = None,
        **_: object,
    ) -> None:
        self._has_server = server_ranks is not None
        self._socket = ""  # of the inference server
        self._supervision = SerialThread("supervision")
        self.incarnations = dict.fromkeys(range(num_workers), 0)
        super().__init__(num_workers, faults, plan_for)
        self._thread_of = dict(zip(self.services, self._threads, strict=True))

    def _begin_all(self, num_workers: int) -> dict[int, WorkerInfo]:
        if not self._has_server:
            return super()._begin_all(num_workers)
        self.incarnations[FIRST_SERVER] = 0
        server = self._begin(FIRST_SERVER).result(SOON_S)
        self._socket = server.socket
        return {**super()._begin_all(num_workers), FIRST_SERVER: server}

    def _begin(self, worker_id: int, incarnation: int = 0) -> Future[WorkerInfo]:
        configured = super()._begin(worker_id, incarnation)
        self._name_server(worker_id)
        return configured

    def _name_server(self, worker_id: int) -> None:
        if self._socket and not is_server(worker_id):
            peer = self.peers[worker_id]
            self.transport.call(peer, WorkerService.ask_server_at, self._socket).result(SOON_S)

    def attach(self, observer: MembershipObserver) -> None:
        self._supervision.submit(super().attach, observer).result(SOON_S)

    def await_enough(self) -> None:
        """Who died is replaced, at most a moment later."""

    def settle(self) -> None:
        """Wait until all that was asked for before has happened."""
        self._supervision.submit(lambda: None).result(SOON_S)

    def kill(self, worker_id: int, *, replaced: bool = True) -> None:
        """The worker dies soon."""
        incarnation = self.incarnations[worker_id]
        self._supervision.submit(self._lose, worker_id, incarnation, "worker_lost", replaced)

    def kill_server(self) -> None:
        """The inference server dies soon, and is replaced."""
        self.kill(FIRST_SERVER)

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
        self.num_present -= not is_server(worker_id)
        self.states[worker_id] = WorkerState.LOST
        self.observer.lose(worker_id, incarnation, replaced=replaced)
        worker.stop()
        self._thread_of[worker_id].join(SOON_S)
        self.observer.account(worker_id, incarnation, cause, worker.counter.stepped)
        if replaced:
            self.incarnations[worker_id] += 1
            self._join(worker_id, self.incarnations[worker_id])

    def _join(self, worker_id: int, incarnation: int) -> None:
        info = self._begin(worker_id, incarnation).result(SOON_S)
        self._thread_of[worker_id] = self._threads[-1]
        self.gpus[worker_id] = info.gpu
        self.num_present += not is_server(worker_id)
        self.states[worker_id] = WorkerState.READY
        self.observer.join(worker_id, incarnation, self.peers[worker_id], info.server)
        if info.socket:
            self._socket = info.socket
            for each in self.services:
                self._name_server(each)

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
