"""The job of Ray that this process is the driver of, as ``ray job submit`` starts one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from distcollect.integrations.ray import cluster as ray_cluster
from distcollect.integrations.ray.settings import RaySettings

_SETTINGS = RaySettings()
_is_running = False


def settings() -> RaySettings | None:
    """Return how this job's workers are requested; None outside of :func:`running`."""
    return _SETTINGS if _is_running else None


@cache
def num_workers() -> int:
    """Return how many workers the CPUs are enough for that are free when this is first called.

    This process then stays connected to Ray.

    Raises:
        LaunchError: Ray can't be reached.
    """
    ray = ray_cluster.connect(_SETTINGS.init_config)
    return max(1, int(ray.available_resources().get("CPU", 0)))


@contextmanager
def running() -> Iterator[None]:
    """Have Ray start the workers of the collectors that are made meanwhile.

    Raises:
        LaunchError: Ray can't be reached.
    """
    global _is_running  # noqa: PLW0603 - a process is the driver of one job
    num_workers()
    before, _is_running = _is_running, True
    try:
        yield
    finally:
        _is_running = before
