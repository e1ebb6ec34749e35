"""Sends weights to workers on three hosts, two ranks each, while one host vanishes.

Prints "sending" when the workers are ready, waits for a line, and only then sends; then prints
how it went, and waits for another line.
"""

import json
import sys
import time

import torch
from torch import nn

import distcollect as dc


class Large(nn.Linear):
    """A policy of 64 MB."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("ballast", torch.zeros(64 << 20, dtype=torch.uint8))

    def forward(self, observation):
        return torch.distributions.Categorical(logits=super().forward(observation))


def say(text):
    print(text, flush=True)


def main():
    policy = Large()
    with dc.RPCDataCollector(
        "CartPole-v1",
        policy,
        frames_per_batch=20,
        faults=dc.Faults(silence_timeout_s=300, weights_timeout_s=300, stop_timeout_s=30),
        weight_updater=dc.BroadcastUpdater(),
    ) as collector:
        groups = []
        updater = collector._backend.updater
        sources, send = updater.sources, updater.send

        def note_group(payload, peers):
            groups.append(sorted(peers))
            # The last worker, on the last host, is to pass the payload on to others.
            return sources(payload, dict(sorted(peers.items(), reverse=True)))

        def send_when_told(payload):
            updater.send = send
            say("sending")
            sys.stdin.readline()
            send(payload)

        updater.sources = note_group
        collector.update_policy_weights_(policy)  # now the members of this group are connected
        groups.clear()
        updater.send = send_when_told
        began = time.monotonic()
        handle = collector.update_policy_weights_(policy, wait=False)
        handle.wait(100)
        took_s = time.monotonic() - began
        left_out = {w: type(error).__name__ for w, error in handle.left_out.items()}
        acknowledged = sorted(handle.acknowledged)
        say(json.dumps({"groups": groups, "acknowledged": acknowledged, "left_out": left_out,
                        "took_s": took_s}))  # fmt: skip
        sys.stdin.readline()
    say("done")


if __name__ == "__main__":
    dc.run(main)
