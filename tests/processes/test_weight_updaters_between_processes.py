"""Weight updaters between processes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
from helpers.envs import ProcessIdEnv
from helpers.publishing import Telling

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_nothing_is_left_of_a_push_that_a_shutdown_meets() -> None:
    def memories() -> list[str]:
        targets = []
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(fd.readlink()))
        return [target for target in targets if "memfd:distcollect" in target]

    before = len(memories())
    for _ in range(5):
        collector = dc.RPCDataCollector(ProcessIdEnv, Telling(), num_workers=1, frames_per_batch=4)
        done = threading.Event()

        def push(collector: Any = collector, done: threading.Event = done) -> None:
            with contextlib.suppress(dc.DistCollectError):
                while not done.is_set():
                    collector.update_policy_weights_(Telling(), wait=False)

        pusher = threading.Thread(target=push)
        pusher.start()
        collector.next()
        collector.shutdown()
        done.set()
        pusher.join(20)
    deadline = time.monotonic() + 20
    while len(memories()) > before:
        assert time.monotonic() < deadline, memories()
        time.sleep(0.05)
