"""The RPC collector over the loopback transport: all of it but processes and sockets of RPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import distcollect as dc
from distcollect.collectors import pooled
from distcollect.config import Faults
from distcollect.errors import WorkerError
from distcollect.loopback import LoopbackTransport
from distcollect.worker import Probe, Worker

ADDRESS = "127.0.0.1"


class LoopbackWorkers:
    """As :class:`~distcollect.cluster.Workers`, each on a thread of this process."""

    def __init__(self, num_workers: int, faults: Faults) -> None:
        self.peers = {worker_id: worker_id + 1 for worker_id in range(num_workers)}
        self.transport = LoopbackTransport()
        self.address = ADDRESS
        self.on_lost: Callable[[int], None] = lambda worker_id: None
        self.services: dict[int, Worker] = {}
        self._threads: list[threading.Thread] = []
        self._start_timeout_s = faults.start_timeout_s
        for worker_id, peer in self.peers.items():
            worker = Worker(worker_id, incarnation=0, peer=peer, address=ADDRESS)
            self.services[worker_id] = worker
            self.transport.connect(peer, worker)
            thread = threading.Thread(target=worker.run, name=f"worker {worker_id}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def configure(self, payloads: Mapping[int, bytes]) -> dict[int, Probe]:
        asked = {
            worker_id: self.transport.call(peer, "configure", payloads[worker_id])
            for worker_id, peer in self.peers.items()
        }
        return {id_: answer.result(self._start_timeout_s) for id_, answer in asked.items()}

    def explain(self, worker_id: int, error: WorkerError) -> WorkerError:
        return error

    def close(self) -> None:
        for worker in self.services.values():
            worker.stop()
        self.transport.close(grace_s=10)
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), f"{thread.name} goes on after stop()"


def loopback_collector(*args: Any, **kwargs: Any) -> dc.RPCDataCollector:
    """An RPCDataCollector whose workers are threads."""
    with patch.object(pooled, "Workers", LoopbackWorkers):
        return dc.RPCDataCollector(*args, **kwargs)
