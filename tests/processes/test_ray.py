"""Workers that Ray starts on this host; over several hosts see tests/hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import finish, start
from helpers.marked import Marked
from helpers.paths import ROOT
from helpers.ray_cluster import SCRIPT, environment, needs_ray, one_node, workers_of_ray
from helpers.waiting import eventually

pytestmark = [needs_ray, pytest.mark.timeout(400)]
NUM_CPUS = 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray instance that all tests here share, whose processes are marked."""
    with contextlib.ExitStack() as undo:
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(*Marked().variable)
        yield undo.enter_context(one_node(NUM_CPUS))


@pytest.fixture(scope="module")
def old_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes Python take distcollect for an older version."""
    folder = tmp_path_factory.mktemp("old")
    code = "import distcollect.version\ndistcollect.version.__version__ = '0.0.1'\n"
    (folder / "sitecustomize.py").write_text(code)
    return folder


def lines_of(output: str) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    return {line["step"]: line for line in lines}


@pytest.fixture(scope="module")
def steps(address: str, old_version: Path) -> dict[str, dict[str, Any]]:
    """What a driver saw that made one collector after the other."""
    path = os.pathsep.join([str(old_version), environment()["PYTHONPATH"]])
    process = start(
        [sys.executable, SCRIPT, "steps"], **environment(RAY_ADDRESS=address, OLD_VERSION=path)
    )
    [output] = finish([process], timeout_s=300)
    return lines_of(output)


def test_batches_arrive(steps: dict[str, dict[str, Any]]) -> None:
    seen = steps["batches"]
    assert seen["shape"] == [2, 32]
    assert seen["workers"] == [0, 1]
    assert seen["versions"] == [[0], [1]]
    one, other = seen["names"]
    assert one.startswith("distcollect-")
    assert (one[-9:], other[-9:]) == ("-worker-0", "-worker-1")


def test_an_actor_that_is_killed_is_replaced_and_joins_again(
    steps: dict[str, dict[str, Any]],
) -> None:
    seen = steps["killed"]
    assert seen["during"] == [1]
    assert seen["after"] == [0, 1]
    assert seen["versions"] == [1]
    assert seen["moved"]


def test_an_inference_server_outlives_the_actor_that_started_it(
    steps: dict[str, dict[str, Any]],
) -> None:
    served = steps["served"]
    assert (len(served["servers"]), served["workers"], served["versions"]) == (1, [0, 1], [1])


def test_a_collector_that_is_closed_leaves_nothing(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["closed"]["actors"] == []
    assert steps["connected"]["connected"]
    assert not steps["disconnected"]["connected"], "the collector had connected this process"
    assert steps["end"]["connected"], "the script had connected this process"


def test_a_connection_that_the_user_makes_or_ends(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["anew"]["kept"]
    assert "no longer connected to Ray" in steps["shut down"]["message"]


def test_arguments_for_a_connection_that_exists_already(steps: dict[str, dict[str, Any]]) -> None:
    [line] = [line for line in steps["ignored"]["logged"] if "ray_init_config" in line]
    assert "has no effect, as this process is connected to Ray already" in line
    assert "ray.init(num_cpus=3)" in line


def test_a_placement_group(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["connected"]["kind"] == "RayDataCollector"
    assert steps["connected"]["workers"] == [0]


def test_a_worker_without_resources_joins_later_and_one_that_is_killed_for_good_never(
    steps: dict[str, dict[str, Any]],
) -> None:
    assert steps["room"]["before"] == [0]
    assert steps["room"]["after"] == [0, 1]
    assert steps["given up"]["workers"] == [0]
    said = "\n".join(steps["given up"]["logged"])
    assert "not replaced: Ray has given up the actor" in said


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (
            "too large",
            "DeadlineError",
            "has not started workers [0, 1] yet (64 CPU wanted for each; free on all 1 node(s): ",
        ),
        (
            "spread",
            "DeadlineError",
            "as STRICT_SPREAD asks; free on all 1 node(s): 2 CPU): they wait for that, or have it",
        ),
        ("version", "WorkerMismatch", "its distcollect is 0.0.1, the trainer's is "),
        ("option", "ArgumentError", "Ray refuses remote_configs={'num_cpu': 1}"),
    ],
)
def test_errors(steps: dict[str, dict[str, Any]], step: str, error: str, message: str) -> None:
    assert steps[step]["error"] == error
    assert message in steps[step]["message"]
    assert steps[step]["left"] == []


def test_a_job_of_ray_whose_driver_is_killed(address: str, marked: Marked) -> None:
    """The driver has the environment that Ray's job supervisor gives it."""
    config = {"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_test"}}
    job = environment(RAY_ADDRESS=address, RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(config))
    inherited = {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}
    before = set(marked.pids())
    driver = start([sys.executable, SCRIPT, "job"], **job, **inherited)
    assert driver.stdout is not None
    seen = json.loads(next(line for line in driver.stdout if line.startswith('{"step"')))
    assert seen["workers"] == [0, 1]
    assert seen["expected"] == NUM_CPUS
    assert len(seen["names"]) == NUM_CPUS
    assert workers_of_ray(sorted({*marked.pids()} - before))
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    eventually(lambda: not workers_of_ray(marked.pids()))


def test_doctor(address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distcollect", "doctor"],
        cwd=ROOT,
        env=environment(RAY_ADDRESS=address),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "1 node(s), with 2 free CPU(s)" in done.stdout, done.stdout + done.stderr
    assert "2 process(es), rank 0 is the trainer" in done.stdout
    assert done.returncode == 0, done.stdout
