"""The place of this process in its launch: the only reader of the launchers' variables."""

from __future__ import annotations

import enum
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distcollect.errors import LaunchError
from distcollect.net.interfaces import LOOPBACK

_SHOWN = re.compile(
    "(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|TORCHELASTIC_RUN_ID|MASTER_(ADDR|PORT)|SUBMITIT_LOCAL_[A-Z_]+"
    "|SLURM_(PROCID|NTASKS|JOB_ID|NNODES|LOCALID|CPUS_PER_TASK|STEP_[A-Z_]+)"
)
# The rank and the number of ranks, as launchers set them that have no way here for the ranks to
# find each other.
_OTHER_LAUNCHERS = {
    "mpirun of Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpirun of MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "mpiexec of MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "a launcher that sets torch's variables": ("RANK", "WORLD_SIZE"),
}

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_SUBMITIT = "SUBMITIT_LOCAL_GLOBALID"
# Set for the driver of a job: its configuration, in which Ray names the job.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# The ids of the steps in which sbatch runs its script, and salloc its shell: each has one process,
# whatever SLURM_NTASKS says.
_ONE_PROCESS_STEPS = {"4294967291", "batch", "4294967290", "interactive"}
_BY_TORCHRUN = (
    f"Start this by torchrun, which sets them all; or unset {_TORCHRUN} to run it by itself"
)
_BY_SRUN = (
    "Start this by srun, also within a batch script, which itself is no task of a step; or unset "
    "SLURM_PROCID to run it by itself"
)


class Launcher(enum.Enum):
    """What started this process."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    SUBMITIT_LOCAL = "submitit's local executor"
    RAY_JOB = "ray job submit"


@dataclass(frozen=True)
class Launch:
    """This process's place in its launch.

    Attributes:
        launcher: what started it.
        rank: 0 is the trainer.
        world_size: trainer and workers together.
        num_hosts: hosts in the launch.
        local_world_size: ranks on this host.
        run_id: the same on all ranks, different from other launches on these hosts.
        master: host name and port where the ranks meet; None without a launcher.
        trainer: which of several trainers this part of the launch belongs to.
        num_trainers: how many these are.
        local_rank: the number of this rank among those on this host.
        cores_per_rank: CPU cores that the scheduler reserved for each rank; None: unknown.
        last_host: the name of a host other than the trainer's, "" if unknown.
    """

    launcher: Launcher = Launcher.NONE
    rank: int = 0
    world_size: int = 1
    num_hosts: int = 1
    local_world_size: int = 1
    run_id: str = ""
    master: tuple[str, int] | None = None
    trainer: int = 0
    num_trainers: int = 1
    local_rank: int = 0
    cores_per_rank: int | None = None
    last_host: str = ""

    @classmethod
    def detect(cls, env: Mapping[str, str] | None = None) -> Launch:
        """Read the launchers' variables; torchrun's come first, as it may itself run under srun.

        Raises:
            LaunchError: they are set but can't be used, or those of another launcher are set.
        """
        env = os.environ if env is None else env
        try:
            launch = cls._read(env)
            _check(launch)
        except ValueError as error:
            shown = {name: env[name] for name in sorted(env) if _SHOWN.fullmatch(name)}
            way = _BY_TORCHRUN if _TORCHRUN in env else _BY_SRUN
            if _SUBMITIT in env and _TORCHRUN not in env:
                way = f"Unset {_SUBMITIT} to run it by itself"
            raise LaunchError(
                f"the launcher's variables can't be used: {error}. {way}. They are {shown}"
            ) from error
        if launch.launcher not in (Launcher.TORCHRUN, Launcher.SUBMITIT_LOCAL):
            _refuse_other_launchers(env, launch)
        return launch

    @classmethod
    def _read(cls, env: Mapping[str, str]) -> Launch:
        if _TORCHRUN in env:
            return cls(
                Launcher.TORCHRUN,
                rank=_whole(env, "RANK"),
                world_size=_whole(env, "WORLD_SIZE"),
                num_hosts=_whole(env, "GROUP_WORLD_SIZE", 1),
                local_world_size=_whole(env, "LOCAL_WORLD_SIZE"),
                run_id=env[_TORCHRUN],
                master=(_text(env, "MASTER_ADDR"), _whole(env, "MASTER_PORT")),
                local_rank=_whole(env, "LOCAL_RANK"),
            )
        if _SUBMITIT in env and _whole(env, "SUBMITIT_LOCAL_NTASKS", 1) > 1:
            return cls._from_submitit(env)
        # Before SLURM: a Ray cluster that runs in a job of SLURM hands its variables down.
        if job := _ray_job(env):
            return cls(Launcher.RAY_JOB, run_id=job)
        if "SLURM_PROCID" in env and _slurm_tasks(env) > 1:
            return cls._from_slurm(env)
        return cls()

    @classmethod
    def _from_submitit(cls, env: Mapping[str, str]) -> Launch:
        tasks = _whole(env, "SUBMITIT_LOCAL_NTASKS")
        job = _whole(env, "SUBMITIT_LOCAL_JOB_ID")  # a process id
        return cls(
            Launcher.SUBMITIT_LOCAL,
            rank=_whole(env, _SUBMITIT),
            world_size=tasks,
            local_world_size=tasks,
            run_id=f"submitit-{job}",
            master=(LOOPBACK, _whole(env, "MASTER_PORT", 20_000 + job * 31 % 10_000)),
            local_rank=_whole(env, "SUBMITIT_LOCAL_LOCALID", 0),
        )

    @classmethod
    def _from_slurm(cls, env: Mapping[str, str]) -> Launch:
        nodes = _text(env, "SLURM_STEP_NODELIST")
        job, step = _whole(env, "SLURM_JOB_ID"), _whole(env, "SLURM_STEP_ID", 0)
        host = env.get("MASTER_ADDR") or first_host(nodes)
        # All tasks of this step can compute this port, and two jobs seldom share it.
        port = _whole(env, "MASTER_PORT", 20_000 + (job * 31 + step * 7) % 10_000)
        tasks = _slurm_tasks(env)
        hosts = _whole(env, "SLURM_STEP_NUM_NODES", _whole(env, "SLURM_NNODES", 1))
        return cls(
            Launcher.SLURM,
            rank=_whole(env, "SLURM_PROCID"),
            world_size=tasks,
            num_hosts=hosts,
            local_world_size=_local_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""), tasks, hosts),
            run_id=f"slurm-{job}-{step}",
            master=(host, port),
            local_rank=_whole(env, "SLURM_LOCALID", 0),
            cores_per_rank=_whole(env, "SLURM_CPUS_PER_TASK", 0) or None,
            last_host=last_host(nodes) if hosts > 1 else "",
        )

    @property
    def num_workers(self) -> int:
        """Worker ranks in this launch."""
        return self.world_size - 1

    def part(self, num_trainers: int) -> Launch:
        """The part of this launch that belongs to this rank's trainer, as a separate launch.

        The first ranks are trainers; the other ranks are assigned to them in turn.

        Raises:
            LaunchError: a trainer would have no workers, or they could not find it.
        """
        num_workers = self.world_size - num_trainers
        if num_workers < num_trainers:
            raise LaunchError(
                f"this launch has {self.world_size} process(es): {num_trainers} trainer(s) with a "
                f"worker each need {2 * num_trainers} (--nproc-per-node={2 * num_trainers}); or "
                "start the script with plain python"
            )
        turn, trainer = divmod(self.rank - num_trainers, num_trainers)
        if self.rank < num_trainers:
            turn, trainer = -1, self.rank
        if self.launcher is Launcher.SLURM and num_trainers > self.local_world_size:
            raise LaunchError(
                f"{num_trainers} trainers, but the first host has {self.local_world_size} task(s): "
                "all trainers have to run there"
            )
        own = len(range(trainer, num_workers, num_trainers))
        return replace(
            self, rank=1 + turn, world_size=1 + own, trainer=trainer, num_trainers=num_trainers
        )


def one_of_several(env: Mapping[str, str] | None = None) -> str:
    """The launcher that started this process as one of several, in words; "" if none did."""
    env = os.environ if env is None else env
    if "SLURM_PROCID" in env and not env.get("SLURM_STEP_NODELIST"):
        # The script of a batch job: one process, with the variables of the whole job.
        env = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
    try:
        launch = Launch.detect(env)
    except LaunchError as error:
        return str(error)
    if launch.world_size == 1:
        return ""
    by = {Launcher.SLURM: "srun"}.get(launch.launcher, launch.launcher.value)
    return f"{by} started this process as rank {launch.rank} of {launch.world_size}"


def _ray_job(env: Mapping[str, str]) -> str:
    """The name of the Ray job that this process is the driver of; "" if it is of none."""
    try:
        metadata = json.loads(env.get(_RAY_JOB, "{}"))["metadata"]
        return str(metadata.get("job_submission_id", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """The number of tasks of this process's step."""
    if env.get("SLURM_STEP_ID") in _ONE_PROCESS_STEPS:
        return 1
    return _whole(env, "SLURM_STEP_NUM_TASKS", _whole(env, "SLURM_NTASKS", 1))


def _refuse_other_launchers(env: Mapping[str, str], launch: Launch) -> None:
    """Raise LaunchError if another launcher started this process as one of several.

    Programs of MPI set these variables under srun too. They say the same as SLURM's then.
    """
    for name, (rank_variable, size_variable) in _OTHER_LAUNCHERS.items():
        if launch.launcher is Launcher.RAY_JOB and rank_variable != "RANK":
            continue  # of the launcher that started the cluster
        rank, size = env.get(rank_variable, ""), env.get(size_variable, "")
        if not (rank.isdigit() and size.isdigit()) or int(size) < 2:
            continue
        if (int(rank), int(size)) != (launch.rank, launch.world_size):
            raise LaunchError(
                f"{name} seems to have started this process as rank {rank} of {size} "
                f"({rank_variable}={rank}, {size_variable}={size}), but its ranks can't find each "
                "other. Start this by torchrun, srun, submitit or plain python; or unset "
                f"{size_variable} to run it by itself"
            )


def _check(launch: Launch) -> None:
    """Raise ValueError if the variables contradict each other."""
    if not 0 <= launch.rank < launch.world_size:
        raise ValueError(f"rank {launch.rank} is not one of the {launch.world_size} ranks")
    if launch.master is not None and not 0 < launch.master[1] < 1 << 16:
        raise ValueError(f"MASTER_PORT={launch.master[1]} is no port")


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ValueError(f"{name} is not set")
    return env[name]


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as an int; ``default`` if it isn't set, or empty."""
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no whole number") from None


def first_host(nodelist: str) -> str:
    """The first name of a SLURM node list: "node[03-05,9],gpu1" gives "node03"."""
    # Commas within brackets separate numbers, not hosts.
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def last_host(nodelist: str) -> str:
    """The last name of a SLURM node list: "gpu1,node[03-05,9]" gives "node9"."""
    last = re.split(r",(?![^\[]*\])", nodelist)[-1]
    return re.sub(r"\[(?:[^\]]*[,-])?([^\]]*)\]", r"\1", last)


def _local_tasks(tasks_per_node: str, tasks: int, hosts: int) -> int:
    # "2(x3),1": two tasks on each of three hosts, one on the next. Which host this is isn't
    # known here, so take the largest number.
    counts = [int(part.split("(")[0]) for part in tasks_per_node.split(",") if part]
    return max(counts, default=-(-tasks // hosts))


def own_name() -> str:
    """This host's name on the cluster's network."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
