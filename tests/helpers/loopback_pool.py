"""The RPC collector over the loopback transport: no processes and no RPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

from helpers.loopback_transport import LoopbackTransport

import distcollect as dc
from distcollect.collectors import with_workers
from distcollect.common.peer_ids import identity
from distcollect.config import Faults
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.net.messages import Spawn, TrainerAddress, WorkerBoot, WorkerSettings
from distcollect.results import WorkerState
from distcollect.roster.interfaces import MembershipObserver
from distcollect.roster.status import WorkerEnds
from distcollect.transport.worker_service import WorkerInfo, WorkerService
from distcollect.worker.service import Worker

ADDRESS = "127.0.0.1"
SOON_S = 60


def new_worker(worker_id: int = 0, incarnation: int = 0, *, peer: int = 1) -> Worker:
    """A worker that no process was started for."""
    wanted = Spawn(worker_id, incarnation, WorkerSettings(), {})
    return Worker(WorkerBoot(wanted, TrainerAddress(ADDRESS, 0, "")), peer=peer, address=ADDRESS)


class LoopbackWorkers:
    """Workers on threads of this process, behind the interface of the worker manager."""

    def __init__(
        self,
        num_workers: int,
        faults: Faults,
        plan_for: Callable[[int], PickledPlan],
        **_: object,
    ) -> None:
        self.transport = LoopbackTransport()
        self.address = ADDRESS
        self.services: dict[int, Worker] = {}
        self.peers: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._plan_for = plan_for
        self.worker_infos = self._begin_all(num_workers)
        self.gpus = {worker_id: probe.gpu for worker_id, probe in self.worker_infos.items()}
        self.states = dict.fromkeys(self.worker_infos, WorkerState.READY)
        self.processes: dict[int, tuple[int, str]] = {}
        self.num_present = num_workers
        self.ends = WorkerEnds()
        self.is_elastic, self.has_enough = False, True

    def _begin_all(self, num_workers: int) -> dict[int, WorkerInfo]:
        """Start the first workers; what each found."""
        configured = {each: self._begin(each) for each in range(num_workers)}
        return {each: answer.result(SOON_S) for each, answer in configured.items()}

    def _begin(self, worker_id: int, incarnation: int = 0) -> Future[WorkerInfo]:
        """Start a worker; what it answers once it is configured."""
        peer = self.peers[worker_id] = identity().new_peer()
        worker = new_worker(worker_id, incarnation, peer=peer)
        self.services[worker_id] = worker
        self.transport.connect(peer, worker)
        thread = threading.Thread(target=worker.run, name=f"worker {worker_id}", daemon=True)
        thread.start()
        self._threads.append(thread)
        for part in self._plan_for(worker_id):
            self.transport.call(peer, WorkerService.receive_part, part).result(SOON_S)
        return self.transport.call(peer, WorkerService.configure)

    def await_enough(self) -> None:
        """They come by themselves."""

    def attach(self, observer: MembershipObserver) -> None:
        self.observer = observer
        for worker_id, peer in self.peers.items():
            observer.join(worker_id, 0, peer, self.worker_infos[worker_id].server)

    def report(
        self, worker_id: int, incarnation: int, error: BaseException, *, is_final: bool = False
    ) -> None:
        self.observer.fail(error)

    def drained(self, worker_id: int, incarnation: int) -> None:
        raise AssertionError("nobody leaves here")

    def close(self) -> None:
        for worker in self.services.values():
            worker.stop()
        self.transport.close(grace_s=10)
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), f"{thread.name} goes on after stop()"


def backend_of(collector: Any) -> Any:
    """Return what a collector is made of: the only place where tests look into one."""
    return collector._backend


def workers_of(collector: Any) -> Any:
    """Return the workers of a collector that :func:`loopback_collector` has made."""
    return backend_of(collector).workers


def loopback_collector(
    *args: Any, kind: Callable[..., dc.RPCDataCollector] = dc.RPCDataCollector, **kwargs: Any
) -> dc.RPCDataCollector:
    """An RPCDataCollector, or a subclass, whose workers are threads."""
    with patch.object(with_workers, "Workers", LoopbackWorkers):
        return kind(*args, **kwargs)
