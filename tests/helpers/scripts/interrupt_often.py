"""A whole program that is interrupted hundreds of times; see test_endings.py.

It prints how many interrupts were sent, and how many reached the user's loop.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import torch

import distcollect as dc

_DURATION_S = 6.0
_LOST_AFTER_S = 5.0

sent = seen = 0
done = threading.Event()
can_catch = threading.Event()  # the user's loop is inside of its try


def interrupt():
    global sent  # noqa: PLW0603 - a whole program
    while not done.wait(random.uniform(0.001, 0.02)):
        can_catch.wait(_LOST_AFTER_S)
        before = seen
        sent += 1
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + _LOST_AFTER_S
        while seen == before and time.monotonic() < deadline:
            time.sleep(0.001)


def policy(observation):
    return torch.zeros(len(observation), dtype=torch.int64)


if __name__ == "__main__":
    with dc.RPCDataCollector(
        "CartPole-v1", policy, frames_per_batch=16, num_workers=2
    ) as collector:
        collector.next()
        interrupter = threading.Thread(target=interrupt, daemon=True)
        end = time.monotonic() + _DURATION_S
        started = False
        while True:
            try:
                if not started:
                    started = True
                    interrupter.start()
                can_catch.set()
                while time.monotonic() < end:
                    collector.next()
                done.set()
                interrupter.join()
                break
            except KeyboardInterrupt:
                can_catch.clear()
                seen += 1
    print(sent, seen, flush=True)
