"""``run(main)``: the same line for every kind of launch."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed

from distcollect.common import checks
from distcollect.common.forks import Owner
from distcollect.common.peer_ids import identify
from distcollect.common.signals import Interrupted
from distcollect.errors import ArgumentError, ArgumentTypeError, LaunchError
from distcollect.integrations import load
from distcollect.launch.cpu_placement import Host, choose, may_pin
from distcollect.launch.main_call import MainCall, ends_as_failed, interpreter_exit_deadline
from distcollect.launch.open_hosts import current, set_launched
from distcollect.launch.rendezvous import (
    RENDEZVOUS_TIMEOUT_S,
    finder,
    listen_address,
    listen_spec,
    own_address,
    read_token,
)
from distcollect.launch.run_folder import LISTENING, TOKEN_VARIABLE, RunFolder
from distcollect.launch.supervisor import supervise
from distcollect.launch.topology import Launch, Launcher, own_name
from distcollect.launch.worker_hosts import WorkerHosts
from distcollect.net.interfaces import LOOPBACK
from distcollect.net.messages import Goodbye

log = logging.getLogger(__name__)

T = TypeVar("T")

# Torch declares no types for its stores.
dist: Any = torch.distributed


def run(main: Callable[[], T], *, num_trainers: int = 1) -> T | None:
    """Call ``main`` on the trainer and serve on all other ranks of the launch.

    Under ``torchrun``, ``srun`` and submitit, rank 0 calls ``main``, and every other rank is a
    worker for the collectors that ``main`` makes, until it returns. Under ``distcollect submit
    --worker-jobs`` the workers are in separate jobs. In a job of Ray (``ray job submit``), Ray
    starts the workers, on any nodes of its cluster. Without a launcher ``main`` is called in this
    process, and collectors start local workers.

    Under a launcher, a process group that ``main`` has made and left is ended here. Objects that
    ``main`` or the script leaves behind have 60 s to end (DISTCOLLECT_EXIT_TIMEOUT_S). After that
    this process writes what hangs to stderr, and ends with its normal exit code.

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
        raise ArgumentTypeError(f"run({main!r}): must be a function: run(main), not run(main())")
    num_trainers = checks.plain(num_trainers)
    checks.positive("num_trainers", num_trainers)
    launch = Launch.detect()
    folder = RunFolder.here()
    if launch.launcher in (Launcher.NONE, Launcher.RAY_JOB):
        if num_trainers > 1:
            raise ArgumentError(
                f"num_trainers={num_trainers} needs a launcher: start the script by torchrun "
                f"--nproc-per-node={2 * num_trainers} or more, or by srun"
            )
        if launch.launcher is Launcher.RAY_JOB:
            with load("ray job").running():
                return main()
        if folder is None or not folder.num_workers:
            return main()
    with interpreter_exit_deadline():
        if launch.launcher is Launcher.NONE:
            assert folder is not None
            hosts = _hosts_of_run(folder)
        else:
            launch = launch.part(num_trainers)
            if launch.rank > 0:
                _supervise(launch)
                return None
            identify(launch.run_id, launch.trainer, launch.num_trainers)
            spec = listen_spec(launch)  # it keeps torchrun's store open, if this process serves it
            ranks, port = launch.num_workers, spec.port
            hosts = WorkerHosts(spec.address, spec.token, num_ranks=ranks, port=port)
            spec.announce(hosts.join_server.port)
        return _train(main, hosts, launch, folder)


def _supervise(launch: Launch) -> None:
    """Start workers for the launch's trainer until it is done."""
    find = finder(launch)
    placement = choose(
        Host.inspect(),
        launch.local_rank,
        launch.local_world_size,
        may_pin=may_pin(os.environ, threads_by_launcher=launch.launcher is Launcher.TORCHRUN),
        cores=launch.cores_per_rank,
    )
    supervise(find, rank=launch.rank, placement=placement, timeout_s=RENDEZVOUS_TIMEOUT_S)


def _train(
    main: Callable[[], T], hosts: WorkerHosts, launch: Launch, folder: RunFolder | None
) -> T:
    """Call ``main`` with ``hosts`` for its collectors, then end all that it left."""
    set_launched(hosts)
    if folder is not None and launch.trainer == 0:
        port = hosts.join_server.port
        folder.tell(LISTENING, host=hosts.address, port=port, pid=os.getpid())
    call, owner = MainCall(main), Owner()
    failed = True
    exiting: SystemExit | None = None
    try:
        with _trainer_variables(launch):
            result = call.result()
        failed = False
    except SystemExit as error:
        exiting, failed = error, ends_as_failed(error)
    finally:
        set_launched(None)
        if owner.is_here:
            is_interrupted = isinstance(exiting, Interrupted)
            resumes = folder is not None and (is_interrupted or bool(folder.later_start()))
            # Torchrun starts ranks again only if all have failed. Under other launchers, ranks
            # that fail after the trainer would hide the cause.
            ranks_fail = failed and launch.launcher is Launcher.TORCHRUN
            hosts.close(Goodbye(ranks_fail), Goodbye(failed, resumes))
    if owner.is_here:
        call.end_what_it_left(exiting)
    if exiting is not None:
        raise exiting
    return result


@contextlib.contextmanager
def _trainer_variables(launch: Launch) -> Iterator[None]:
    """Set torch's environment variables for a group of the trainers alone."""
    if launch.num_trainers == 1:
        yield
        return
    variables = {"RANK": str(launch.trainer), "WORLD_SIZE": str(launch.num_trainers)}
    if launch.launcher is not Launcher.TORCHRUN:
        assert launch.master is not None
        host, port = launch.master
        host = LOOPBACK if launch.num_hosts == 1 else host
        # The trainers' join servers use the ports from this one on.
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port + launch.num_trainers)}
        variables["LOCAL_RANK"] = str(launch.trainer)
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)  # main() may have removed it
        os.environ.update({name: before[name] for name in variables if name in before})


def num_workers(default: int) -> int:
    """Number of workers that this launch provides; ``default`` without a launcher.

    For sizes that depend on it, such as ``frames_per_batch``. With several trainers it is the
    number of this trainer's workers: call it within ``main``. In a job of Ray it is the number of
    the cluster's CPUs that are free when this, or :func:`run`, is first called.

    Args:
        default: what to return for a script that was started by plain python.

    Raises:
        LaunchError: the launcher's variables can't be used.
    """
    if (launched := current()) is not None:
        return launched.num_workers(None)
    launch = Launch.detect()
    if launch.launcher is Launcher.RAY_JOB:
        return int(load("ray job").num_workers())
    if launch.launcher is Launcher.NONE:
        folder = RunFolder.here()
        return default if folder is None else folder.num_workers or default
    return launch.num_workers


def _hosts_of_run(folder: RunFolder) -> WorkerHosts:
    """The hosts of a run whose workers are in separate jobs."""
    token = read_token()
    if token is None:
        raise LaunchError(
            f"{TOKEN_VARIABLE} is not set, but the workers of this run have the token in "
            f"{folder.token_file}: set it to that file, as 'distcollect submit' does"
        )
    address, port = listen_address()
    if not port:
        address = own_address(own_name())
    return WorkerHosts(
        address,
        token,
        num_expected=folder.num_workers,
        patience_s=folder.patience_s,
        port=port,
    )
