"""What the ranks of a launch above 0 do."""

from __future__ import annotations

import os

from distcollect.launch.cpu_placement import Host, choose, may_pin
from distcollect.launch.rendezvous import RENDEZVOUS_TIMEOUT_S, finder
from distcollect.launch.supervisor import supervise
from distcollect.launch.topology import Launch, Launcher


def supervise_rank(launch: Launch) -> None:
    """Be a launch's supervisor until its trainer is done."""
    find = finder(launch)
    placement = choose(
        Host.inspect(),
        launch.local_rank,
        launch.local_world_size,
        may_pin=may_pin(os.environ, threads_by_launcher=launch.launcher is Launcher.TORCHRUN),
        cores=launch.cores_per_rank,
    )
    supervise(find, rank=launch.rank, placement=placement, timeout_s=RENDEZVOUS_TIMEOUT_S)
