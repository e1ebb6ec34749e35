"""Collects over hosts that something happens to; see test_hosts.py.

collect_on_hosts.py cables     measures bytes on the wire; then somebody pulls cables
collect_on_hosts.py restart    fails in the first attempt
collect_on_hosts.py rate       measures bytes on the wire
collect_on_hosts.py collect    merely collects
collect_on_hosts.py elastic    hosts come while it runs: collects until there are three workers
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

import distcollect as dc

SHAPE = (64, 1024)
FRAMES = 40


class Noise(gym.Env):
    """Observations that can't be compressed: 64 KB."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        return self.rng.integers(0, 256, SHAPE, np.uint8), {}

    def step(self, action):
        return self.rng.integers(0, 256, SHAPE, np.uint8), 1.0, False, False, {}


class Small(gym.Env):
    """Takes its time, and kills the rank that it runs on if told so."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        deadly = os.environ.get("DISTCOLLECT_TEST_DEADLY_ATTEMPT")
        self.deadly = deadly == os.environ["TORCHELASTIC_RESTART_COUNT"]
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.deadly and self.steps == 100:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(0.001)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def received_bytes():
    """What this host's interfaces got so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = (line.split(":") for line in lines)
    return sum(int(counts.split()[0]) for name, counts in fields if name.strip() != "lo")


def say(text):
    print(text, flush=True)


def measure(collector, num_batches=32):
    """Say how many bytes of observations come in a second, and how many each is on the wire."""
    for _ in range(4):
        collector.next()
    before, began = received_bytes(), time.monotonic()
    for _ in range(num_batches):
        collector.next()
    took_s, got = time.monotonic() - began, received_bytes() - before
    payload = num_batches * FRAMES * SHAPE[0] * SHAPE[1]
    say(json.dumps({"wire": got / payload, "payload_bytes_per_s": payload / took_s}))


def cables():
    with dc.RPCDataCollector(Noise, frames_per_batch=FRAMES) as collector:
        measure(collector)

        def until(num_workers, worker_id):
            """There are so many, and this one has delivered."""
            delivered = -1
            while collector.num_workers != num_workers or delivered != worker_id:
                batch = collector.next(timeout_s=60)
                delivered = int(batch["collector", "worker_id"][0, 0])

        say("running")
        sys.stdin.readline()
        # A rollout that was asked for before the cable was pulled may have been under way.
        until(2, 1)
        until(2, 1)
        until(2, 1)
        say("again")
        until(1, 0)
        say("lost")
        until(1, 0)
    report = collector.ledger
    assert report.total.open == 0, report
    say("done")


def collect(num_workers):
    with dc.RPCDataCollector(Small, frames_per_batch=50) as collector:
        say(f"workers {collector.num_workers}")
        count = 0
        while count < 20 or collector.num_workers < num_workers:
            collector.next(timeout_s=60)
            count += 1
    say("done")


def main():
    if sys.argv[1] == "cables":
        cables()
    elif sys.argv[1] == "rate":
        with dc.RPCDataCollector(Noise, frames_per_batch=FRAMES) as collector:
            measure(collector)
    elif sys.argv[1] == "elastic":
        collect(3)
    else:
        collect(1)
    if sys.argv[1] == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt fails")


if __name__ == "__main__":
    dc.run(main)
