"""Weight updaters between processes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import cloudpickle
from helpers.descendants import links_of
from helpers.envs import ProcessIdEnv
from helpers.publishing import Telling

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_nothing_is_left_of_a_push_that_a_shutdown_meets() -> None:
    def memories() -> list[str]:
        return [link for link in links_of("self") if "memfd:distcollect" in link]

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
