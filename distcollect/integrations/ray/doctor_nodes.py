"""Has Ray start a rank of the doctor on each node of its cluster."""

from __future__ import annotations

from functools import partial
from typing import Any

from distcollect.commands.doctor.ranks import Ranks, take_part_at
from distcollect.integrations.ray import cluster as ray_cluster


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
        free = self._ray.available_resources().get("CPU", 0.0)
        return f"Ray {self._ray.__version__}: {len(self)} node(s), with {free:g} free CPU(s)"

    def start_ranks(self, ranks: Ranks, wait_s: float) -> None:
        """Start a rank on each node, from 1 on; each ends when the trainer has finished."""
        on_node = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for rank, node in enumerate(self._nodes, start=1):
            there = on_node(node["NodeID"], soft=False)
            task = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)
            done = task(take_part_at).remote(ranks.trainer, rank, wait_s)
            where = f"rank {rank} ({node['NodeManagerHostname']})"
            done.future().add_done_callback(partial(_report, ranks, where))


def _report(ranks: Ranks, where: str, done: Any) -> None:
    if (error := done.exception()) is not None:
        ranks.failed(where, str(getattr(error, "cause", None) or error))
