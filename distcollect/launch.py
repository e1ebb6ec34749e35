"""``run(main)``: one line for every kind of launch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed

from . import arguments
from .cluster import Cluster, current, listen_address, read_token, set_launched
from .errors import ArgumentError, LaunchError
from .link import Lifeline, Message, NoAnswer
from .notice import Interrupted
from .processes import End, LocalProcesses, ProcessEvents
from .run_folder import LISTENING, RunFolder
from .topology import LOOPBACK, Launch, Launcher, num_cores, own_name, route_to
from .workers import close_workers

log = logging.getLogger(__name__)

T = TypeVar("T")

# Torch declares no types for its stores.
dist: Any = torch.distributed

_MEET_TIMEOUT_S = 300.0
# After the connection broke off: a cable that is pulled and put back takes some time.
_MEET_AGAIN_TIMEOUT_S = 60.0
_TRY_TIMEOUT_S = 5.0
# Hundreds may wait for hours.
_RETRY_S, _LONGEST_RETRY_S = 0.2, 2.0
_GATE_KEY = "distcollect/gate"


def run(main: Callable[[], T], *, num_trainers: int = 1) -> T | None:
    """Call ``main`` on the trainer and serve on all other ranks of the launch.

    Under ``torchrun`` and ``srun``, rank 0 calls ``main`` and every other rank serves as a worker
    of the collectors that ``main`` makes, until it returns. In a job of ``distcollect submit`` that
    has its workers in jobs apart, these are its workers. Under no launcher ``main`` is called right
    here, and collectors start local workers of their own.

    Args:
        main: the training.
        num_trainers: so many ranks, the first, call ``main``, each with its own share of the
            others as workers. Within ``main``, RANK and WORLD_SIZE are those among the trainers, so
            that ``torch.distributed.init_process_group()`` makes a group of these, for DDP say.
            Each publishes to its own workers: after a step that all trainers took together these
            get the same weights, as the same version. The same seed gives each its own envs.

    Returns:
        What ``main`` returned; None on the other ranks.

    Raises:
        ArgumentError, ArgumentTypeError: no such number of trainers.
        LaunchError: there are too few ranks, or they can't find each other.
    """
    arguments.positive("num_trainers", num_trainers)
    launch = Launch.detect()
    folder = RunFolder.here()
    if launch.launcher is Launcher.NONE:
        if num_trainers > 1:
            raise ArgumentError(
                f"num_trainers={num_trainers} needs a launcher: start the script by torchrun"
            )
        if folder is None or not folder.num_workers:
            return main()
        cluster = _open_to_all(folder)
    else:
        launch = launch.part(num_trainers)
        if launch.rank > 0:
            _supervise(launch)
            return None
        cluster = _open_gate(launch)
    set_launched(cluster)
    if folder is not None and launch.trainer == 0:
        folder.tell(LISTENING, host=cluster.address, port=cluster.gate.port, pid=os.getpid())
    resumes = False
    try:
        with _among_trainers(launch, num_trainers):
            return main()
    except Interrupted:
        resumes = folder is not None
        raise
    finally:
        # While their supervisors are still there to end them.
        close_workers()
        set_launched(None)
        cluster.close(resumes=resumes)


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
    """Workers that this launch provides; ``default`` where there is no launcher.

    For sizes that depend on it, such as ``frames_per_batch``. With several trainers each has its
    own: call it within ``main``.
    """
    if (launched := current()) is not None:
        return launched.num_workers(None)
    launch = Launch.detect()
    if launch.launcher is Launcher.NONE:
        folder = RunFolder.here()
        return default if folder is None else folder.num_workers or default
    return launch.num_workers


def _open_gate(launch: Launch) -> Cluster:
    assert launch.master is not None
    if launch.launcher is Launcher.SLURM:
        host, port = launch.master
        address = LOOPBACK if _is_on_one_host(launch) else _own_address(host)
        address, wanted_port = listen_address(default=address)
        return Cluster(
            address,
            read_token() or launch.run_id,
            num_ranks=launch.num_workers,
            port=(wanted_port or port) + launch.trainer,
            trainer=launch.trainer,
        )
    store = _torchrun_store(launch)
    address = LOOPBACK
    if launch.num_hosts > 1:
        # The way to a worker on another host: by it, workers will find the way here.
        address = route_to(store.get(_address_key(launch.world_size - 1)).decode())
    address, port = listen_address(default=address)
    token = read_token() or secrets.token_hex(16)
    cluster = Cluster(
        address,
        token,
        num_ranks=launch.num_workers,
        port=port + launch.trainer if port else 0,
        trainer=launch.trainer,
    )
    store.set(_GATE_KEY, json.dumps(Meeting(address, cluster.gate.port, token)))
    return cluster


def _is_on_one_host(launch: Launch) -> bool:
    """Whether nobody comes from elsewhere, as jobs of workers may that are added to a run."""
    return launch.num_hosts == 1 and RunFolder.here() is None


def _open_to_all(folder: RunFolder) -> Cluster:
    """The trainer's side of a run whose workers are in jobs of their own."""
    token = read_token()
    if token is None:
        raise LaunchError(f"{folder.token_file} is not named by DISTCOLLECT_TOKEN_FILE")
    address, port = listen_address()
    if not port:
        address = _own_address(own_name())
    return Cluster(
        address,
        token,
        num_expected=folder.num_workers,
        patience_s=folder.patience_s,
        port=port,
    )


def _own_address(name: str) -> str:
    remedy = "set MASTER_ADDR to this host's address on the cluster's network"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise LaunchError(f"this host's name {name!r} has no address: {error}; {remedy}") from error
    if address.startswith("127."):
        raise LaunchError(
            f"this host's name {name!r} resolves to {address}, which others can't reach; {remedy}"
        )
    return address


def _torchrun_store(launch: Launch) -> Any:
    assert launch.master is not None
    # The agent serves the store, except with static rendezvous, where rank 0 has to.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        *launch.master,
        is_master=not served and launch.rank == launch.trainer == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=_MEET_TIMEOUT_S),
    )
    return dist.PrefixStore(f"{launch.run_id}/{launch.trainer}", store)


def _address_key(rank: int) -> str:
    return f"distcollect/address/{rank}"


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


class Meeting(NamedTuple):
    """Where the trainer's gate is, and what to show there."""

    host: str
    port: int
    token: str


def supervise(
    find: Callable[[], Meeting],
    *,
    rank: int | None,
    num_threads: int,
    timeout_s: float,
    patience_s: float | None = None,
) -> None:
    """Start and watch worker processes on the trainer's word, until it needs them no more.

    When the connection breaks off the workers here end; if the trainer can be reached again, all
    goes on with new ones.

    Args:
        find: tells where the trainer is; raises OSError or DistStoreError if that isn't known yet.
        rank: of this process in its launch; None: it just joins.
        num_threads: torch's, in each worker process.
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
            lifeline, meeting = _join(
                find, rank, timeout_s, give_up_if_refused=broken_off and patience_s is None
            )
            boot = {**meeting._asdict(), "num_threads": num_threads}
            if _serve(lifeline, boot):
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


def _join(
    find: Callable[[], Meeting], rank: int | None, timeout_s: float, *, give_up_if_refused: bool
) -> tuple[Lifeline, Meeting]:
    deadline = time.monotonic() + timeout_s
    problem: Exception | None = None
    pause_s = _RETRY_S
    while time.monotonic() < deadline:
        try:
            meeting = find()
            return _introduce(meeting, rank), meeting
        except ConnectionRefusedError as error:
            if give_up_if_refused:
                raise SystemExit("distcollect: the trainer is gone; this rank ends") from None
            problem = error
        except (OSError, NoAnswer, dist.DistStoreError) as error:
            # Not there yet; or, after a restart by torchrun, the address of the last attempt.
            problem = error
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _LONGEST_RETRY_S)
    who = "this process" if rank is None else f"rank {rank}"
    raise LaunchError(
        f"{who} could not reach the trainer within {timeout_s:g} s; the last try said: {problem}"
    )


def _introduce(meeting: Meeting, rank: int | None) -> Lifeline:
    lifeline = Lifeline(meeting.host, meeting.port, _TRY_TIMEOUT_S)
    try:
        lifeline.join("supervisor", meeting.token, rank=rank)
    except BaseException:
        lifeline.close()
        raise
    return lifeline


def _serve(lifeline: Lifeline, boot: Mapping[str, Any]) -> bool:
    """Obey one connection to its end; whether the trainer said goodbye."""
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
    return message is not None and not message.get("wait")


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
    assert launch.master is not None
    store: Any = None
    if launch.launcher is Launcher.TORCHRUN:
        store = _torchrun_store(launch)
        if launch.num_hosts > 1:
            store.set(_address_key(launch.rank), route_to(launch.master[0]))
        store.set_timeout(timedelta(seconds=1))
    host, port = launch.master
    host, wanted_port = listen_address(default=LOOPBACK if _is_on_one_host(launch) else host)
    port = (wanted_port or port) + launch.trainer
    here = Meeting(host, port, read_token() or launch.run_id)

    def find() -> Meeting:
        return here if store is None else Meeting(*json.loads(store.get(_GATE_KEY)))

    num_threads = max(1, num_cores() // launch.local_world_size)
    supervise(find, rank=launch.rank, num_threads=num_threads, timeout_s=_MEET_TIMEOUT_S)
