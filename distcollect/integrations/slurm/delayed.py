"""``submitit_delayed_launcher``: a decorator that submits its script to SLURM.

It has the name and the arguments of TorchRL's, and does what ``distcollect submit --worker-jobs``
does.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distcollect.common import checks
from distcollect.common.checks import unknown_argument
from distcollect.errors import ArgumentError, LaunchError
from distcollect.integrations.slurm import submit
from distcollect.launch.run import run
from distcollect.launch.run_folder import RunFolder

T = TypeVar("T")

# Submitit's names of what a job requests, without "slurm_", and those of `distcollect submit`.
_NAMES = {
    **{name: name for name in ("time", "partition", "mem_gb")},
    **{name: name for name in ("cpus_per_task", "gpus_per_node", "tasks_per_node")},
    "timeout_min": "time",
    "ntasks_per_node": "tasks_per_node",
}
_NAMES_OF_TRAINER = {**_NAMES, "nodes": "nodes", "name": "name", "job_name": "name"}
# Where TorchRL keeps the requests of jobs for which nothing is given: scripts change them there.
_THEIR_DEFAULTS = "torchrl.collectors.distributed.default_configs"


def submitit_delayed_launcher(  # noqa: PLR0917 - the arguments of TorchRL
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | str | None = None,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
    *,
    submit_options: Sequence[str] = (),
) -> Callable[[Callable[[], T]], Callable[[], T | None]]:
    """Decorate a ``main()`` so that calling it submits the script to a SLURM cluster.

    On a login node, the decorated function submits one job that runs the script again, and
    ``num_jobs`` jobs of workers, and waits until the trainer's job has ended. In the trainer's job
    it calls ``main()`` under :func:`distcollect.run`, and the collector that ``main`` makes has
    these workers. It is the same as
    ``distcollect submit --wait --worker-jobs NUM_JOBS SCRIPT ARGUMENTS``.

    Args:
        num_jobs: number of jobs of workers.
        framework: "rpc" or "distributed"; both are the same here.
        backend: accepted for TorchRL's scripts, without effect: collectors choose how weights
            travel, see :class:`~distcollect.WeightSync`.
        tcpport: accepted, without effect: the system chooses the ports.
        submitit_main_conf: what the trainer's job requests, by submitit's names such as
            ``slurm_partition``, ``timeout_min`` or ``slurm_cpus_per_task``. Others that begin with
            ``slurm_`` are options of sbatch. None: TorchRL's ``DEFAULT_SLURM_CONF_MAIN`` if the
            script has imported it, otherwise the defaults of ``distcollect submit``.
        submitit_collection_conf: the same for each job of workers, which is on one node;
            ``slurm_ntasks_per_node`` is the number of workers in it. None: TorchRL's
            ``DEFAULT_SLURM_CONF``, or the defaults.
        submit_options: further options of ``distcollect submit``, such as ``["--run-folder",
            "/shared/run1"]``.

    Returns:
        A decorator. The decorated function returns what ``main`` returned in the trainer's job, and
        None on the login node. It raises ArgumentError or LaunchError where ``distcollect submit``
        would fail, and LaunchError if the trainer's job failed.

    Raises:
        ArgumentError: an argument can't be used.
    """
    checks.positive("num_jobs", num_jobs)
    if framework not in ("distributed", "rpc"):
        raise ArgumentError(f"framework={framework!r}: must be 'rpc' or 'distributed'")
    del backend, tcpport

    def decorate(main: Callable[[], T]) -> Callable[[], T | None]:
        @functools.wraps(main)
        def submit_or_run() -> T | None:
            if RunFolder.here() is not None:
                return run(main)
            of_trainer = _conf(submitit_main_conf, "DEFAULT_SLURM_CONF_MAIN")
            of_workers = _conf(submitit_collection_conf, "DEFAULT_SLURM_CONF")
            words = [
                *("--wait", "--worker-jobs", str(num_jobs)),
                *_options_of(of_trainer, _NAMES_OF_TRAINER, "--"),
                *_options_of(of_workers, _NAMES, "--worker-"),
            ]
            _submit([*words, *submit_options, *_own_script()])
            return None

        return submit_or_run

    return decorate


def _conf(given: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    if given is not None:
        return given
    theirs = sys.modules.get(_THEIR_DEFAULTS)
    return {} if theirs is None else getattr(theirs, name)


def _options_of(conf: Mapping[str, Any], names: Mapping[str, str], prefix: str) -> list[str]:
    """The options of ``distcollect submit`` for what a job requests.

    Args:
        conf: the requests, by submitit's names.
        names: those that have an option of their own.
        prefix: of all options.
    """
    words: list[str] = []
    for given, value in conf.items():
        name = given.removeprefix("slurm_")
        if value is None:
            continue
        if name in names:
            # Those of workers are --worker-tasks, --worker-cpus and --worker-gpus.
            own = names[name] if prefix == "--" else names[name].partition("_per_")[0]
            # As in submitit, "timeout_min" yields to "slurm_time": the last of two options counts.
            at = 0 if name == "timeout_min" else len(words)
            words.insert(at, f"{prefix}{own.replace('_', '-')}={value}")
        elif name == "setup":
            words += [f"--setup={line}" for line in value]
        elif name == "additional_parameters":
            words += [f"{prefix}slurm={_of_sbatch(key, each)}" for key, each in value.items()]
        elif name != given:
            words.append(f"{prefix}slurm={_of_sbatch(name, value)}")
        else:
            known = [each if each == "timeout_min" else f"slurm_{each}" for each in names]
            raise ArgumentError(
                f"what a job requests: {unknown_argument(given, known)}; and slurm_NAME for every "
                "other option of sbatch"
            )
    return words


def _of_sbatch(name: str, value: object) -> str:
    """An option of sbatch; True stands for one without a value, as in submitit."""
    return name.replace("_", "-") + ("" if value is True else f"={value}")


def _own_script() -> list[str]:
    """The script of this process, and its arguments.

    Raises:
        LaunchError: this process runs no script.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or getattr(main, "__spec__", None) is not None:
        raise LaunchError(
            "submitit_delayed_launcher submits the script that calls it: save the code as a file, "
            "and start it by 'python FILE' on a login node"
        )
    return [str(Path(path).absolute()), *sys.argv[1:]]


def _submit(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="distcollect submit", allow_abbrev=False)
    submit.add_arguments(parser)
    if submit.run(parser.parse_args(words)) != 0:
        raise LaunchError("the trainer's job failed: its output is above, and in the run folder")
