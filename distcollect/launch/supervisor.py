"""A supervisor: a process that starts worker processes for its trainer, and watches them.

Every rank of a launch above 0 is one. A ``distcollect worker --join`` is one too, and so is each
actor of Ray. It doesn't import torch, which takes seconds and 150 MB.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from distcollect.common import open_files
from distcollect.common.process_exit import STRAY_CONNECTION
from distcollect.errors import slot_name
from distcollect.launch import zygote
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.local_processes import LocalProcesses
from distcollect.launch.zygote import Inheritance
from distcollect.net.client import ControlConnection, TrainerGone, join
from distcollect.net.messages import (
    Goodbye,
    Kill,
    Spawn,
    SupervisorHello,
    TrainerAddress,
)

log = logging.getLogger(__name__)

# After the connection broke off: a cable that is pulled and put back takes some time.
_REJOIN_TIMEOUT_S = 60.0
# After the trainer has failed, the other ranks end this much later.
_FAIL_DELAY_S = 3.0


class _Terminated(SystemExit):
    """SIGTERM or SIGINT reached a supervisor; its exit code is that of shells."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def supervise(
    find: Callable[[], TrainerAddress],
    *,
    rank: int | None,
    placement: CpuPlacement,
    timeout_s: float,
    patience_s: float | None = None,
    name: str = "",
) -> bool:
    """Start and watch worker processes as the trainer requests, until it needs them no more.

    When the connection breaks off, the worker processes here are ended; if the trainer can be
    reached again, it can have new ones started.

    Args:
        find: returns where the trainer is; raises OSError if that isn't known yet.
        rank: of this process in its launch; None: it is in no launch.
        placement: of its worker process on this host.
        timeout_s: how long to try to reach the trainer.
        patience_s: how long to try to reach it again, after it was lost or said that it would be
            started again; None: a minute, and not if nobody listens at its address any more.
        name: what to call this process in an error; "": after its rank.

    Returns:
        Whether the trainer ended without an error.

    Raises:
        LaunchError: the trainer can't be reached, or refused.
        SystemExit: the trainer is gone, or a signal ended this process.
    """
    open_files.fill_standard_streams()
    give_up = False
    name = name or ("this process" if rank is None else f"rank {rank}")
    hello = SupervisorHello(rank=rank)
    with _signals():
        zygote.warm_up(Inheritance.now())
        while True:
            try:
                connection, trainer = join(
                    find, hello, timeout_s, name=name, give_up_if_refused=give_up
                )
            except TrainerGone:
                if rank is not None:
                    _fail(f"the trainer is gone (if by SIGABRT or SIGSEGV: {STRAY_CONNECTION})")
                raise SystemExit("distcollect: the trainer is gone; this process ends") from None
            log.info("joined the trainer at %s:%d", trainer.host, trainer.port)
            goodbye = _serve(connection, trainer, placement)
            if goodbye is not None and not goodbye.resumes:
                if goodbye.failed and rank is not None:
                    _fail("the trainer failed")
                return not goodbye.failed
            log.warning("the trainer is gone, or was cut off; looking for it again")
            give_up = patience_s is None
            timeout_s = _REJOIN_TIMEOUT_S if patience_s is None else patience_s


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Have the first SIGTERM or SIGINT raise :class:`_Terminated`; restore the handlers.

    If it comes while processes are ended, their guards end them when this process does.
    """

    def terminate(number: int, _frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Terminated(number)

    handlers: dict[int, Any] = {
        signal.SIGTERM: terminate,
        signal.SIGINT: terminate,
        # Batch systems tell every process of a job that it will end. The trainer decides what
        # follows.
        signal.SIGUSR1: signal.SIG_IGN,
        signal.SIGUSR2: signal.SIG_IGN,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set by Python, which so can't restore it.
            signal.signal(number, handler or signal.SIG_DFL)


def _fail(why: str) -> NoReturn:
    """End this rank as failed, so that torchrun starts it again with the trainer, if it may.

    It waits before it ends: torchrun and SLURM name the rank that failed first as the cause, and
    on the trainer's host they end the others.
    """
    time.sleep(_FAIL_DELAY_S)
    raise SystemExit(f"distcollect: {why}; this rank ends")


def _serve(
    connection: ControlConnection,
    trainer: TrainerAddress,
    placement: CpuPlacement,
) -> Goodbye | None:
    """Do what the trainer requests until it says goodbye; None: the connection broke off."""
    processes = LocalProcesses(connection.send)
    leave_timeout_s = grace_s = 0.0
    goodbye: Goodbye | None = None
    try:
        while goodbye is None and (message := connection.receive()) is not None:
            if isinstance(message, Spawn):
                leave_timeout_s = message.settings.leave_timeout_s
                processes.spawn(message, trainer, placement)
            elif isinstance(message, Kill):
                name = slot_name(message.worker_id)
                if message.why:
                    log.warning("%s is ended by the trainer: %s", name, message.why)
                processes.kill(message.worker_id, message.incarnation)
            elif isinstance(message, Goodbye):
                goodbye = message
    except _Terminated as error:
        if error.number == signal.SIGTERM:
            # The host is about to be taken away: workers deliver what they have. They end at once
            # if the trainer is gone.
            grace_s = leave_timeout_s
            processes.terminate()
        raise
    finally:
        with contextlib.closing(connection):
            processes.close(grace_s)
    return goodbye
