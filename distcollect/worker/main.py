"""The entry point of a worker process."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from functools import partial

import torch

from distcollect import errors
from distcollect.common.forks import Owner
from distcollect.common.open_files import flush_output
from distcollect.common.shared_memory import sample_for
from distcollect.common.step_counter import StepCounter
from distcollect.common.worker_guard import name_process
from distcollect.errors import is_server, slot_name
from distcollect.net.client import ControlConnection, join
from distcollect.net.messages import (
    Exit,
    Leaving,
    PeerAddress,
    Reachable,
    Stop,
    WorkerBoot,
    WorkerHello,
    WorkerWelcome,
)
from distcollect.transport.start import start_server
from distcollect.worker.peer_listener import PeerListener
from distcollect.worker.service import Worker

log = logging.getLogger(__name__)

# While the engine computes, a thread that answers the trainer waits this long for the interpreter
# lock. With Python's own 5 ms, several times in a push, that wait is most of a small push's time.
_SWITCH_INTERVAL_S = 0.0005
_JOIN_TIMEOUT_S = 60.0


def main(boot: WorkerBoot) -> None:
    """Run a worker process until its trainer ends it or is gone."""
    # Proxies of a multiprocessing.Manager, for example, prove with it that they may connect.
    multiprocessing.current_process().authkey = bytes.fromhex(boot.authkey)
    _name_worker_in_logs(boot.wanted.name)
    name_process("dc-" + slot_name(boot.wanted.worker_id).replace(" ", "-"))
    counter = StepCounter.inherited(boot.counters_fd)
    errors.worker_pid = os.getpid()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if not faulthandler.is_enabled():
        faulthandler.enable(all_threads=False)  # shows the line where a native library crashed
    # As libgomp reads it: "4,2" has a number for each level of nesting, and it ignores "auto".
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if not threads.isdecimal() or not int(threads):
        torch.set_num_threads(boot.num_threads)
    connection = _join(boot)
    welcome = connection.welcome
    assert isinstance(welcome, WorkerWelcome), welcome
    for_others = partial(PeerListener, connection, boot.trainer.token)
    address = connection.local_address
    worker = Worker(boot, peer=welcome.peer, address=address, counter=counter, listen=for_others)
    server = start_server(welcome.transport, worker, connection, address)
    endpoint = server.endpoint  # where the trainer reaches this process, if it connects
    if welcome.hands_over:
        endpoint = for_others(partial(start_server, welcome.transport, worker)).endpoint

    may_exit = threading.Event()

    def listen() -> None:
        try:
            while (message := connection.receive()) is not None:
                if isinstance(message, Stop):
                    worker.stop()
                elif isinstance(message, Exit):
                    may_exit.set()
        except Exception:
            log.exception("what the trainer sent is unusable")
        finally:
            # The trainer is gone, and an env may hang: only this ends the process for certain. What
            # the envs left running is ended by the process that started this one.
            flush_output()
            os._exit(1)

    threading.Thread(target=listen, name="distcollect-control", daemon=True).start()
    connection.send(Reachable(PeerAddress(endpoint, sample_for(welcome.trainer_memory))))

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # a second one would wait for this one
        connection.send_soon(Leaving())  # as the handler may interrupt this thread in its sending

    # A server ends with its workers, which may need it to leave in order.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if is_server(boot.wanted.worker_id) else leave)
    _run(worker)
    may_exit.wait()  # listen() ends the process at the latest when the trainer is gone
    flush_output()
    os._exit(0)  # threads of torch may still wait for something


def _join(boot: WorkerBoot) -> ControlConnection:
    wanted, trainer = boot.wanted, boot.trainer
    hello = WorkerHello(worker_id=wanted.worker_id, incarnation=wanted.incarnation)
    if boot.control_fd < 0:
        connection, _ = join(
            lambda: trainer, hello, _JOIN_TIMEOUT_S, name=wanted.name, give_up_if_refused=True
        )
        return connection
    connection = ControlConnection(trainer.host, 0, _JOIN_TIMEOUT_S, fd=boot.control_fd)
    try:
        connection.join(hello, trainer.token, _JOIN_TIMEOUT_S)
    except ConnectionError:
        # Its trainer has ended, as by Ctrl-C, or says itself that a worker doesn't join.
        raise SystemExit(1) from None
    return connection


def _name_worker_in_logs(name: str) -> None:
    """Log with time, worker and host, unless the user's code configures logging itself."""
    if logging.lastResort is not None:
        where = f"{name} on {socket.gethostname()}"
        logging.lastResort.setFormatter(logging.Formatter(f"%(asctime)s {where}: %(message)s"))


def _run(worker: Worker) -> None:
    """Do what the trainer requests; a child that an env forks ends here."""
    owner, code = Owner(), 1
    try:
        worker.run()
        code = 0
    finally:
        if not owner.is_here:
            os._exit(code)
