"""``run(main)``: one line for every kind of launch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

import torch.distributed

from . import arguments
from .cluster import Cluster, current, listen_address, read_token, set_launched
from .errors import ArgumentError, ArgumentTypeError, LaunchError
from .link import Lifeline, Message, NoAnswer
from .meeting import MEET_TIMEOUT_S, Meeting, finder, gate_place, own_address
from .network import LOOPBACK
from .notice import Interrupted
from .placement import Host, Place, choose, may_pin
from .processes import End, LocalProcesses, ProcessEvents
from .run_folder import LISTENING, TOKEN_VARIABLE, RunFolder
from .topology import Launch, Launcher, own_name
from .transport import identify
from .workers import close_workers

log = logging.getLogger(__name__)

T = TypeVar("T")

# Torch declares no types for its stores.
dist: Any = torch.distributed

# After the connection broke off: a cable that is pulled and put back takes some time.
_MEET_AGAIN_TIMEOUT_S = 60.0
_TRY_TIMEOUT_S = 5.0
# Hundreds may wait for hours.
_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
# Ranks whose trainer has failed end so much later.
_LAST_S = 3.0


def run(main: Callable[[], T], *, num_trainers: int = 1) -> T | None:
    """Call ``main`` on the trainer and serve on all other ranks of the launch.

    Under ``torchrun`` and ``srun``, rank 0 calls ``main``, and every other rank is a worker for the
    collectors that ``main`` makes, until it returns. Under ``distcollect submit --worker-jobs`` the
    workers are in separate jobs. Without a launcher ``main`` is called in this process, and
    collectors start local workers.

    Args:
        main: the training function.
        num_trainers: how many ranks, the first ones, call ``main``, each with its own share of the
            others as workers. Within ``main``, RANK and WORLD_SIZE count trainers only, so
            ``torch.distributed.init_process_group()`` makes a group of these, for example for DDP.
            Each trainer publishes to its own workers: after a step that all trainers took together,
            all workers get the same weights, as the same version. With the same seed, each
            trainer's envs still have seeds of their own.

    Returns:
        What ``main`` returned; None on the other ranks.

    Raises:
        ArgumentError, ArgumentTypeError: ``num_trainers`` can't be used.
        LaunchError: there are too few ranks, or they can't find each other.
    """
    if not callable(main):
        raise ArgumentTypeError(f"run({main!r}): must be a function without parameters, your main")
    arguments.positive("num_trainers", num_trainers)
    launch = Launch.detect()
    folder = RunFolder.here()
    if launch.launcher is Launcher.NONE:
        if num_trainers > 1:
            raise ArgumentError(
                f"num_trainers={num_trainers} needs a launcher: start the script by torchrun "
                f"--nproc-per-node={2 * num_trainers} or more, or by srun"
            )
        if folder is None or not folder.num_workers:
            return main()
        cluster = _open_to_all(folder)
    else:
        launch = launch.part(num_trainers)
        if launch.rank > 0:
            _supervise(launch)
            return None
        identify(launch.run_id, launch.trainer, num_trainers)
        cluster = _open_gate(launch)
    set_launched(cluster)
    if folder is not None and launch.trainer == 0:
        folder.tell(LISTENING, host=cluster.address, port=cluster.gate.port, pid=os.getpid())
    failed, resumes = True, False
    try:
        with _among_trainers(launch, num_trainers):
            result = main()
    except Interrupted:
        failed, resumes = False, folder is not None
        raise
    except SystemExit as error:
        failed = error.code not in (None, 0)
        raise
    else:
        failed = False
        return result
    finally:
        # While their supervisors are still there to end them.
        close_workers()
        set_launched(None)
        # Torchrun starts ranks again only if all have failed; elsewhere they would hide the cause.
        fails = failed and launch.launcher is Launcher.TORCHRUN
        cluster.close(failed=fails, resumes=resumes)


@contextlib.contextmanager
def _among_trainers(launch: Launch, num_trainers: int) -> Iterator[None]:
    """Torch's variables as they are among the trainers alone."""
    if num_trainers == 1:
        yield
        return
    variables = {"RANK": str(launch.trainer), "WORLD_SIZE": str(num_trainers)}
    if launch.launcher is Launcher.SLURM:
        assert launch.master is not None
        host, port = launch.master
        host = LOOPBACK if launch.num_hosts == 1 else host
        # The trainers' gates have the ports from this one on.
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port + num_trainers)}
        variables["LOCAL_RANK"] = str(launch.trainer)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def num_workers(default: int) -> int:
    """Number of workers that this launch provides; ``default`` without a launcher.

    For sizes that depend on it, such as ``frames_per_batch``. With several trainers it is the
    number of this trainer's workers: call it within ``main``.

    Args:
        default: what to return for a script that was started by plain python.

    Raises:
        LaunchError: the launcher's variables can't be used.
    """
    if (launched := current()) is not None:
        return launched.num_workers(None)
    launch = Launch.detect()
    if launch.launcher is Launcher.NONE:
        folder = RunFolder.here()
        return default if folder is None else folder.num_workers or default
    return launch.num_workers


def _open_gate(launch: Launch) -> Cluster:
    place = gate_place(launch)
    cluster = Cluster(
        place.address,
        place.token,
        num_ranks=launch.num_workers,
        port=place.port,
        trainer=launch.trainer,
    )
    place.announce(cluster.gate.port)
    cluster.store = place.store
    return cluster


def _open_to_all(folder: RunFolder) -> Cluster:
    """The trainer's side of a run whose workers are in jobs of their own."""
    token = read_token()
    if token is None:
        raise LaunchError(
            f"{TOKEN_VARIABLE} is not set, but the workers of this run come with what is in "
            f"{folder.token_file}: set it to that file, as 'distcollect submit' does"
        )
    address, port = listen_address()
    if not port:
        address = own_address(own_name())
    return Cluster(
        address,
        token,
        num_expected=folder.num_workers,
        patience_s=folder.patience_s,
        port=port,
    )


class _Terminated(BaseException):
    """SIGTERM or SIGINT reached a supervisor."""


class _Reports(ProcessEvents):
    """Tells the trainer of worker processes."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline

    def exited(self, worker_id: int, incarnation: int, end: End) -> None:
        """See :class:`~distcollect.processes.ProcessEvents`."""
        self._lifeline.send({"exited": asdict(end), "incarnation": incarnation})

    def bloated(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        """See :class:`~distcollect.processes.ProcessEvents`."""
        self._lifeline.send({"bloated": num_bytes, "incarnation": incarnation})


def supervise(
    find: Callable[[], Meeting],
    *,
    rank: int | None,
    place: Place,
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
    find: Callable[[], Meeting],
    rank: int | None,
    timeout_s: float,
    *,
    give_up_if_refused: bool,
    role: str = "supervisor",
) -> tuple[Lifeline, Meeting]:
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
        except (OSError, NoAnswer, dist.DistStoreError) as error:
            # Not there yet; or, after a restart by torchrun, the address of the last attempt.
            problem = error
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _LONGEST_RETRY_S)
    who = "this process" if rank is None else f"rank {rank}"
    raise LaunchError(
        f"{who} could not reach the trainer within {timeout_s:g} s; the last try{where} said: "
        f"{problem}. Does it run, what does it say itself, and do firewalls let this host through?"
    )


def _introduce(meeting: Meeting, rank: int | None, role: str) -> Lifeline:
    lifeline = Lifeline(meeting.host, meeting.port, _TRY_TIMEOUT_S)
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


def _serve(lifeline: Lifeline, boot: Mapping[str, Any]) -> Message | None:
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
    processes: LocalProcesses, lifeline: Lifeline, message: Message, boot: Mapping[str, Any]
) -> None:
    env = {str(key): str(value) for key, value in message["env"].items()}
    worker_id, incarnation = message["spawn"], message["incarnation"]
    try:
        processes.spawn(worker_id, incarnation, {**message["boot"], **boot}, env)
    except OSError as error:
        end = End(-1, 0, f"it could not be started: {error}")
        lifeline.send({"exited": asdict(end), "incarnation": incarnation})


def _end_with(lifeline: Lifeline, processes: LocalProcesses) -> None:
    """End all processes when the trainer is gone."""
    while lifeline.receive() is not None:
        pass
    processes.kill_all()


def _supervise(launch: Launch) -> None:
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
