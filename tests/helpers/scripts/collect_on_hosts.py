"""Collects over several hosts while a test disturbs them; see test_hosts.py.

collect_on_hosts.py cables     measures bytes on the wire; then the test pulls cables
collect_on_hosts.py restart    fails in the first attempt
collect_on_hosts.py collect    collects
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
    """Steps take 1 ms; kills its rank if a variable says so."""

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
            os.kill(int(os.environ["PID_OF_RANK"]), signal.SIGKILL)
        time.sleep(0.001)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def received_bytes():
    """The bytes that this host's interfaces have received so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = (line.split(":") for line in lines)
    return sum(int(counts.split()[0]) for name, counts in fields if name.strip() != "lo")


def say(text):
    print(text, flush=True)


def measure(collector, num_batches=32):
    """Print the bytes on the wire for each byte of an observation."""
    for _ in range(4):
        collector.next()
    before = received_bytes()
    for _ in range(num_batches):
        collector.next()
    got = received_bytes() - before
    payload = num_batches * FRAMES * SHAPE[0] * SHAPE[1]
    say(json.dumps({"wire": got / payload}))


def cables():
    with dc.RPCDataCollector(Noise, frames_per_batch=FRAMES) as collector:
        measure(collector)

        def until(num_workers, worker_id):
            """Collect until there are ``num_workers`` and worker ``worker_id`` has delivered."""
            delivered = -1
            while collector.num_workers != num_workers or delivered != worker_id:
                batch = collector.next(timeout_s=60)
                delivered = int(batch["collector", "worker_id"][0, 0])

        say("running")
        sys.stdin.readline()
        # A rollout requested before the cable was pulled may still arrive.
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
    elif sys.argv[1] == "elastic":
        collect(3)
    else:
        collect(1)
    if sys.argv[1] == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt fails")


if __name__ == "__main__":
    os.environ["PID_OF_RANK"] = str(os.getpid())  # workers inherit it
    dc.run(main)
