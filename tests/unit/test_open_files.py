"""How many files a trainer may open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import distcollect as dc
from distcollect.common import open_files
from distcollect.launch.worker_hosts import WorkerHosts


@pytest.fixture
def low_limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Earlier tests may have left files open: torch keeps the sockets of broadcasts that hang.
    low = 200 + len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_trainer_raises_its_soft_limit(low_limit: int) -> None:
    WorkerHosts("127.0.0.1", "a token").join_server.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == open_files.highest_limit()
    assert soft > low_limit
    assert soft in (hard, 1 << 20)


def test_too_many_workers_are_refused_before_anything_starts() -> None:
    assert open_files.shortage(10, are_local=True) == ""
    with pytest.raises(dc.ArgumentError, match=r"^120000 workers need at least 1080140 open files"):
        dc.RPCDataCollector("CartPole-v1", frames_per_batch=120_000, num_workers=120_000)
