"""The entry of a worker process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from distcollect.common.shared_memory import sample_of_memory
from distcollect.common.step_counter import StepCounter
from distcollect.net.client import ControlConnection, exit_now
from distcollect.transport.rpc import PeerAddress, RpcTransport
from distcollect.worker.service import Worker

# While the engine computes, a thread that answers the trainer waits this long for the interpreter's
# lock. With Python's default of 5 ms, such waits would be most of the time of a small push.
_SWITCH_INTERVAL_S = 0.0005
_JOIN_TIMEOUT_S = 60.0


def main(boot: dict[str, Any]) -> None:
    """Run a worker process from its boot message until its trainer ends it or is gone.

    Args:
        boot: "host" and "port" of the trainer's gate, "token", "worker_id", "incarnation",
            "num_threads" (torch's), "vitals" (a descriptor, see
            :class:`~distcollect.common.step_counter.SharedStepCounter`), "first_traj_id".
    """
    # The trainer handles Ctrl-C; a terminal, or torchrun, may send it to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    counts = StepCounter.inherited(boot["vitals"])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(boot["num_threads"])
    lifeline = ControlConnection(boot["host"], boot["port"], _JOIN_TIMEOUT_S)
    about = {key: boot[key] for key in ("worker_id", "incarnation")}
    welcome = lifeline.join("worker", boot["token"], **about)
    address = lifeline.local_address
    worker = Worker(
        boot["worker_id"],
        incarnation=boot["incarnation"],
        peer=welcome["peer"],
        address=address,
        counts=counts,
        first_traj_id=boot["first_traj_id"],
    )
    transport = RpcTransport(welcome["peer"], address=address, service=worker)
    transport.connect(welcome["trainer_peer"], PeerAddress(welcome["trainer_endpoint"]))

    dismissed = threading.Event()

    def watch() -> None:
        while (message := lifeline.receive()) is not None:
            if "stop" in message:
                worker.stop()
            elif "bye" in message:
                dismissed.set()
        # The trainer is gone, and an env may hang: only this ends the process for certain.
        exit_now(1)

    threading.Thread(target=watch, name="distcollect-lifeline", daemon=True).start()
    told_to_leave = threading.Event()

    def leave() -> None:
        told_to_leave.wait()
        lifeline.send({"leaving": True})

    # Not in the handler itself, as it may interrupt code that is sending a message.
    threading.Thread(target=leave, name="distcollect-leave", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: told_to_leave.set())
    lifeline.send({"endpoint": transport.endpoint, "segment": sample_of_memory()})
    worker.run()
    dismissed.wait()  # ends with the trainer at the latest: see above
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch may still be waiting. The process that started this one ends processes that
    # the envs left behind.
    os._exit(0)
