"""Sends weights to workers on three hosts, three ranks each, and counts bytes on the wire.

Prints how many copies of the plan, which holds the weights, and of the weights alone leave the
trainer's host for each other host; then a relay,
which passes the weights on to the other workers of its host, kills itself while it receives.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import distcollect as dc

PAYLOAD = 16 << 20
NUM_HOSTS, PER_HOST = 3, 3
ON_SECOND_HOST = range(PER_HOST - 1, 2 * PER_HOST - 1)  # the trainer is on the first, too


class Large(nn.Linear):
    def __init__(self):
        super().__init__(1, 2)
        self.register_buffer("ballast", torch.randint(0, 256, (PAYLOAD,), dtype=torch.uint8))

    def forward(self, observation):
        return torch.distributions.Categorical(logits=super().forward(observation))


class Mortal(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def die_in(self, seconds):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.001)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def sent_bytes():
    """The bytes that this host's interfaces have sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = (line.split(":") for line in lines)
    return sum(int(counts.split()[8]) for name, counts in fields if name.strip() != "lo")


def main():
    policy = Large()
    num_bytes = sent_bytes()
    with dc.RPCDataCollector(
        Mortal,
        policy,
        frames_per_batch=20,
        faults=dc.Faults(silence_timeout_s=300, weights_timeout_s=300, stop_timeout_s=30),
    ) as collector:
        copies_of_plan = (sent_bytes() - num_bytes) / PAYLOAD / (NUM_HOSTS - 1)

        def push():
            policy.ballast.random_(0, 256)
            num_bytes, began = sent_bytes(), time.monotonic()
            handle = collector.update_policy_weights_(policy, wait=False)
            handle.wait(200)
            copies = (sent_bytes() - num_bytes) / PAYLOAD / (NUM_HOSTS - 1)
            return copies, time.monotonic() - began, handle

        push()  # makes connections
        copies, took_s, handle = push()
        told = {"copies_of_plan": copies_of_plan, "copies": copies,
                "took_s": took_s, "transfer_s": handle.timings["transfer_s"],
                "acknowledged": sorted(handle.acknowledged)}  # fmt: skip
        relay = ON_SECOND_HOST[0]
        collector.call("die_in", took_s / 2, worker_ids=relay)
        copies, took_s, handle = push()
        told["copies_with_a_death"] = copies
        told["took_with_a_death_s"] = took_s
        told["acknowledged_with_a_death"] = sorted(handle.acknowledged)
        told["version"] = handle.version
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    dc.run(main)
