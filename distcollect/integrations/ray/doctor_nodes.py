"""Has Ray start a rank of the doctor on each node of its cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

from distcollect.commands.doctor.ranks import DoctorHello, Ranks, take_part
from distcollect.integrations.ray import cluster as ray_cluster
from distcollect.net.client import join
from distcollect.net.messages import TrainerAddress


class RayRank:
    """An actor that is a rank of the doctor."""

    def take_part(self, *, rank: int, host: str, port: int, token: str, timeout_s: float) -> None:
        """Join the doctor, and answer until it has finished.

        Raises:
            LaunchError: it can't be reached, or refused.
        """
        trainer = TrainerAddress(host, port, token)
        control, _ = join(lambda: trainer, DoctorHello(), timeout_s, name=f"rank {rank}")
        take_part(control, rank)


class RayNodes:
    """The nodes of the cluster that this process is connected to."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            LaunchError: Ray is not installed, or can't be reached.
        """
        self._ray = ray_cluster.connect({})
        self.address = str(self._ray.util.get_node_ip_address())
        self._nodes = ray_cluster.nodes(self._ray)

    def close(self) -> None:
        """Release the connection."""
        ray_cluster.release()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def about(self) -> str:
        """The cluster, in words."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        counted = {
            name: total[name]
            for name in sorted(total)
            if not name.startswith(("node:", "object_store"))
        }
        return (
            f"Ray {self._ray.__version__}: {len(self)} node(s) with "
            f"{ray_cluster.words(counted)}; free now: "
            f"{ray_cluster.words({name: free.get(name, 0.0) for name in counted})}"
        )

    @contextlib.contextmanager
    def ranks(self, server: Ranks, port: int, token: str, timeout_s: float) -> Iterator[None]:
        """A rank on each node, from 1 on, in the order of the nodes; killed at the end."""
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        actors = []
        try:
            for rank, node in enumerate(self._nodes, start=1):
                options: dict[str, Any] = {
                    "name": f"distcollect-doctor-{rank}-{secrets.token_hex(3)}",
                    "num_cpus": 0,
                    "scheduling_strategy": strategy(node["NodeID"], soft=False),
                }
                actor = self._ray.remote(RayRank).options(**options).remote()
                actors.append(actor)
                done = actor.take_part.remote(
                    rank=rank, host=self.address, port=port, token=token, timeout_s=timeout_s
                )
                where = f"rank {rank} ({node['NodeManagerHostname']})"
                done.future().add_done_callback(partial(_report, server, where))
            yield
        finally:
            for actor in actors:
                self._ray.kill(actor)


def _report(server: Ranks, where: str, done: Any) -> None:
    if (error := done.exception()) is not None:
        server.failed(where, str(getattr(error, "cause", None) or error))
