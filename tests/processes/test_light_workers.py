"""Many workers that only answer: what a trainer needs for each of them, by TCP with TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.light_workers import Light, collect_all
from helpers.transport_contract import SMALL, check, num_threads
from helpers.transport_peer import Service

from distcollect.transport.protocol import CollectRequest

# Of 400 kB: with these, memory that is not given back would show.
WIDE = 10_000
ROUNDS = 6
MOST_GROWTH = 32 << 20


def collect(light: Light, num_steps: int) -> None:
    for tensors in collect_all(light.transport, light.peers, CollectRequest(num_steps)):
        check(tensors, num_steps)


@pytest.fixture(params=[16, 128, pytest.param(256, marks=pytest.mark.slow)])
def light(request: pytest.FixtureRequest) -> Iterator[Light]:
    world = Light(request.param)
    yield world
    world.close()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def test_one_thread_no_polling_and_no_growth(light: Light) -> None:
    collect(light, SMALL)
    collect(light, WIDE)
    threads = num_threads()
    assert [light.transport.call(p, Service.echo, p) for p in light.peers]
    before = resident_bytes()
    used_s = time.process_time()
    for _ in range(ROUNDS):
        collect(light, SMALL)
    used_s = time.process_time() - used_s
    for _ in range(ROUNDS):
        collect(light, WIDE)
    growth = resident_bytes() - before
    print(
        f"{light.number} workers joined within {light.joined_s:.2f} s; "
        f"{1e6 * used_s / ROUNDS / light.number:.0f} us of CPU for a rollout, "
        f"{growth >> 20} MiB more after {ROUNDS} rounds"
    )
    assert growth < MOST_GROWTH
    assert num_threads() <= threads
    # One serves them all, and one copies what lies in shared memory.
    assert len(set(threading.enumerate()) - light.earlier) <= 2
    # Nobody has to do anything now.
    begin, idle_s = time.monotonic(), time.process_time()
    time.sleep(1)
    assert time.process_time() - idle_s < 0.1 * (time.monotonic() - begin)
