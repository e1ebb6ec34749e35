"""Workers learn where the inference server is that they ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distcollect.launch.worker_hosts import WorkerHosts
from distcollect.roster.process import Process, ProcessKey
from distcollect.transport.protocol import Transport
from distcollect.transport.worker_service import WorkerService


def name_servers(
    hosts: WorkerHosts,
    transport: Transport,
    processes: Mapping[ProcessKey, Process],
    workers: Iterable[Process],
) -> None:
    """Tell ``workers`` of the servers that are ready; those that can't be reached are not told.

    Call it for a worker once it can be reached, and for all when a server is ready.
    """
    for worker in workers:
        slot, is_remote = hosts.server_for(worker.worker_id)
        for server in processes.values():
            if server.worker_id == slot and server.info is not None and not server.is_over:
                place = server.info.endpoint if is_remote else server.info.socket
                transport.call(worker.peer, WorkerService.ask_server_at, place)
