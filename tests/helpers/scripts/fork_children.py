"""A trainer that forks children, which leave in several ways while its worker goes on.

It prints each child's exit code, then whether the same worker process still delivers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.envs import ProcessIdEnv

import distcollect as dc
from distcollect.common import signals


def code_of(child):
    """The exit code of a child; -N if signal N ended it."""
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return "it hangs"
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def worker_of(batch):
    [pid] = batch["observation"].unique().long().tolist()
    return pid


def leave(how, collector):
    """What a child does."""
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise RuntimeError("of a child")
    if how == "use":
        try:
            collector.next()
        except dc.CollectorStateError as error:
            sys.exit(7 if str(os.getppid()) in str(error) else 8)
    if how == "shutdown":
        collector.shutdown()
        sys.exit(0)
    while True:
        signal.pause()


def main():
    signals.watch(lambda: None)
    with dc.RPCDataCollector(ProcessIdEnv, frames_per_batch=16, num_workers=1) as collector:
        before = worker_of(collector.next())
        ready, child_is_ready = os.pipe()
        for how in ("exit", "raise", "use", "shutdown", "signal"):
            child = os.fork()
            if child == 0:
                os.write(child_is_ready, b"x")
                leave(how, collector)
            os.read(ready, 1)
            if how == "signal":
                os.kill(child, signal.SIGTERM)
            print(how, code_of(child), flush=True)
        for _ in range(20):  # more than were collected ahead
            batch = collector.next()
        print("same worker", worker_of(batch) == before, flush=True)


if __name__ == "__main__":
    dc.run(main)
