"""Which cores and how many threads workers get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distcollect.launch.cpu_placement import (
    CpuPlacement,
    Host,
    choose,
    may_pin,
    read_cores,
    read_nodes,
    read_quota,
)

NODES = (tuple(range(8)), tuple(range(8, 16)))
TWO_NODES = Host(cores=tuple(range(16)), nodes=NODES)


def places(host: Host, count: int, **kwargs: bool) -> list[CpuPlacement]:
    return [choose(host, index, count, **{"may_pin": True, **kwargs}) for index in range(count)]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_workers_are_kept_to_numa_nodes(count: int) -> None:
    got = places(TWO_NODES, count)
    assert [place.cores for place in got] == [NODES[0]] * (count // 2) + [NODES[1]] * (count // 2)
    assert {place.num_threads for place in got} == {1}


def test_a_worker_between_two_nodes_is_free() -> None:
    cores = [place.cores for place in places(TWO_NODES, 3)]
    assert cores == [NODES[0], None, NODES[1]]
    four = Host(cores=tuple(range(16)), nodes=tuple((i, i + 1) for i in range(0, 16, 2)))
    assert [place.cores for place in places(four, 2)] == list(NODES)


@pytest.mark.parametrize(
    ("host", "count"),
    [
        (Host(cores=(0, 1), nodes=((0, 1),)), 2),  # one node
        (Host(cores=tuple(range(16))), 4),  # unknown nodes
        (TWO_NODES, 1),  # one worker gets all
        (TWO_NODES, 17),  # more workers than cores
        (Host(cores=tuple(range(4, 12)), nodes=NODES), 2),  # the user has chosen these
        (Host(cores=tuple(range(16)), quota=6.0, nodes=NODES), 2),
        (Host(cores=tuple(range(16)), quota=99.0, nodes=NODES), 1),
    ],
)
def test_left_alone(host: Host, count: int) -> None:
    assert places(host, count) == [CpuPlacement(None, 1)] * count


def test_what_the_scheduler_set_aside() -> None:
    mine = Host(cores=(4, 5, 6, 7), nodes=NODES)
    assert choose(mine, 3, 4, may_pin=True, cores=4) == CpuPlacement(None, 4)
    assert choose(TWO_NODES, 0, 2, may_pin=False, cores=3) == CpuPlacement(None, 3)
    small = Host(cores=tuple(range(16)), quota=2.5)
    assert choose(small, 0, 2, may_pin=True, cores=4) == CpuPlacement(None, 2)


def test_the_user_comes_first() -> None:
    assert may_pin({})
    assert not may_pin({"DISTCOLLECT_PIN": "0"})
    assert not may_pin({"OMP_NUM_THREADS": "1"})
    assert not may_pin({"OMP_PROC_BIND": "close"})
    assert may_pin({"OMP_NUM_THREADS": "1"}, threads_by_launcher=True)
    assert not may_pin({"OMP_NUM_THREADS": "4"}, threads_by_launcher=True)
    assert {place.cores for place in places(TWO_NODES, 4, may_pin=False)} == {None}


def test_lists_of_the_kernel(tmp_path: Path) -> None:
    assert read_cores("0-2,8\n") == (0, 1, 2, 8)
    assert read_cores("\n") == ()  # a NUMA node with memory only
    for node, cores in ((0, "0-1"), (10, "4"), (2, "2-3")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert read_nodes(tmp_path) == ((0, 1), (2, 3), (4,))
    assert read_nodes(tmp_path / "nothing") == ()
    assert set(os.sched_getaffinity(0)) <= {core for node in read_nodes() for core in node}


def test_quota_of_cgroups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    step = tmp_path / "job" / "step"
    step.mkdir(parents=True)
    assert read_quota(tmp_path, membership) is None
    (step / "cpu.max").write_text("max 100000\n")
    assert read_quota(tmp_path, membership) is None
    (tmp_path / "job" / "cpu.max").write_text("250000 100000\n")
    assert read_quota(tmp_path, membership) == 2.5
    membership.write_text("3:cpu,cpuacct:/v1\n2:memory:/job\n")
    old = tmp_path / "cpu,cpuacct" / "v1"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("50000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert read_quota(tmp_path, membership) == 0.5
    assert read_quota(tmp_path, tmp_path / "nothing") is None
