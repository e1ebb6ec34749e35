"""A rank that is no trainer: starts worker processes for the trainer, and watches them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from torch.distributed import DistStoreError

from distcollect.errors import LaunchError
from distcollect.launch.cpu_placement import CpuPlacement, Host, choose, may_pin
from distcollect.launch.local_processes import End, LocalProcesses, ProcessEvents
from distcollect.launch.rendezvous import MEET_TIMEOUT_S, TrainerAddress, finder
from distcollect.launch.topology import Launch, Launcher
from distcollect.net.client import ControlConnection, NoAnswer
from distcollect.net.framing import Message

log = logging.getLogger(__name__)

# After the connection broke off: a cable that is pulled and put back takes some time.
_MEET_AGAIN_TIMEOUT_S = 60.0


_TRY_TIMEOUT_S = 5.0


# Hundreds may wait for hours.
_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0


# Ranks whose trainer has failed end so much later.
_LAST_S = 3.0


class _Terminated(BaseException):
    """SIGTERM or SIGINT reached a supervisor."""


class _Reports(ProcessEvents):
    """Tells the trainer of worker processes."""

    def __init__(self, lifeline: ControlConnection) -> None:
        self._lifeline = lifeline

    def exited(self, worker_id: int, incarnation: int, end: End) -> None:
        """See :class:`~distcollect.launch.local_processes.ProcessEvents`."""
        self._lifeline.send({"exited": asdict(end), "incarnation": incarnation})

    def bloated(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        """See :class:`~distcollect.launch.local_processes.ProcessEvents`."""
        self._lifeline.send({"bloated": num_bytes, "incarnation": incarnation})


def supervise(
    find: Callable[[], TrainerAddress],
    *,
    rank: int | None,
    place: CpuPlacement,
    timeout_s: float,
    patience_s: float | None = None,
) -> None:
    """Start and watch worker processes on the trainer's word, until it needs them no more.

    When the connection breaks off the workers here end; if the trainer can be reached again, all
    goes on with new ones.

    Args:
        find: tells where the trainer is; raises OSError or DistStoreError if that isn't known yet.
        rank: of this process in its launch; None: it just joins.
        place: of its worker process on this host.
        timeout_s: for the trainer to be there.
        patience_s: for it to come back, if it was lost or said that it would; None: a minute, and
            not if nobody listens where it was.

    Raises:
        LaunchError: the trainer can't be reached, or refused.
        SystemExit: the trainer is gone, or a signal ended this process.
    """
    broken_off = False
    while True:
        _arm()
        try:
            lifeline, meeting = join(
                find, rank, timeout_s, give_up_if_refused=broken_off and patience_s is None
            )
            boot = {**asdict(meeting), **asdict(place)}
            goodbye = _serve(lifeline, boot)
            if goodbye is not None and not goodbye.get("wait"):
                if goodbye.get("failed") and rank is not None:
                    _fail("the trainer failed")
                return
        except _Terminated as error:
            raise SystemExit(128 + error.args[0]) from None
        log.warning("the trainer is gone, or was cut off; looking for it again")
        broken_off = True
        timeout_s = _MEET_AGAIN_TIMEOUT_S if patience_s is None else patience_s


def _arm() -> None:
    """Have signals end this process in order."""

    def terminate(number: int, _frame: object) -> NoReturn:
        raise _Terminated(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, terminate)
    # Batch systems tell every process of a job that it will end. The trainer decides what follows.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def join(
    find: Callable[[], TrainerAddress],
    rank: int | None,
    timeout_s: float,
    *,
    give_up_if_refused: bool,
    role: str = "supervisor",
) -> tuple[ControlConnection, TrainerAddress]:
    """Introduce this process to the trainer; a lifeline, and where it leads.

    Raises:
        LaunchError: it can't be reached within ``timeout_s``, or refused.
        SystemExit: nobody listens there any more, and ``give_up_if_refused``.
    """
    deadline = time.monotonic() + timeout_s
    problem: Exception | None = None
    pause_s, where = _RETRY_S, ""
    while time.monotonic() < deadline:
        try:
            meeting = find()
            where = f", at {meeting.host}:{meeting.port},"
            return _introduce(meeting, rank, role), meeting
        except ConnectionRefusedError as error:
            if give_up_if_refused and rank is not None:
                _fail("the trainer is gone")
            if give_up_if_refused:
                raise SystemExit("distcollect: the trainer is gone; this process ends") from None
            problem = error
        except (OSError, NoAnswer, DistStoreError) as error:
            # Not there yet; or, after a restart by torchrun, the address of the last attempt.
            problem = error
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _LONGEST_RETRY_S)
    who = "this process" if rank is None else f"rank {rank}"
    raise LaunchError(
        f"{who} could not reach the trainer within {timeout_s:g} s; the last try{where} said: "
        f"{problem}. Does it run, what does it say itself, and do firewalls let this host through?"
    )


def _introduce(meeting: TrainerAddress, rank: int | None, role: str) -> ControlConnection:
    lifeline = ControlConnection(meeting.host, meeting.port, _TRY_TIMEOUT_S)
    try:
        lifeline.join(role, meeting.token, rank=rank)
    except BaseException:
        lifeline.close()
        raise
    return lifeline


def _fail(why: str) -> NoReturn:
    """End this rank as failed, so that torchrun starts it again with the trainer, if it may.

    But later than the trainer: the first rank that fails is what torchrun and SLURM name as the
    cause, and on the trainer's host they end the others.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait(_LAST_S)
    raise SystemExit(f"distcollect: {why}; this rank ends")


def _serve(lifeline: ControlConnection, boot: Mapping[str, Any]) -> Message | None:
    """Obey one connection to its end; the trainer's goodbye, if there was one."""
    processes = LocalProcesses(_Reports(lifeline))
    leave_timeout_s = grace_s = 0.0
    try:
        while (message := lifeline.receive()) is not None:
            if "spawn" in message:
                leave_timeout_s = float(message["boot"]["leave_timeout_s"])
                _spawn(processes, lifeline, message, boot)
            elif "kill" in message:
                processes.kill(message["kill"], message["incarnation"])
            elif "bye" in message:
                break
    except _Terminated as error:
        if error.args[0] == signal.SIGTERM:
            # Notice of the end: there is time for what they have, while the trainer lives.
            grace_s = leave_timeout_s
            processes.terminate()
            threading.Thread(target=_end_with, args=(lifeline, processes), daemon=True).start()
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        processes.close(grace_s)
        lifeline.close()
    return message


def _spawn(
    processes: LocalProcesses,
    lifeline: ControlConnection,
    message: Message,
    boot: Mapping[str, Any],
) -> None:
    env = {str(key): str(value) for key, value in message["env"].items()}
    worker_id, incarnation = message["spawn"], message["incarnation"]
    try:
        processes.spawn(worker_id, incarnation, {**message["boot"], **boot}, env)
    except OSError as error:
        end = End(-1, 0, f"it could not be started: {error}")
        lifeline.send({"exited": asdict(end), "incarnation": incarnation})


def _end_with(lifeline: ControlConnection, processes: LocalProcesses) -> None:
    """End all processes when the trainer is gone."""
    while lifeline.receive() is not None:
        pass
    processes.kill_all()


def supervise_rank(launch: Launch) -> None:
    """Hold a rank for the trainer."""
    find = finder(launch)
    place = choose(
        Host.look(),
        launch.local_rank,
        launch.local_world_size,
        may_pin=may_pin(os.environ, threads_by_launcher=launch.launcher is Launcher.TORCHRUN),
        cores=launch.cores_per_rank,
    )
    supervise(find, rank=launch.rank, place=place, timeout_s=MEET_TIMEOUT_S)
