"""Processes of submitted tasks, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from distcollect.commands.slurm.jobs import Job, Resources, Submitter
from distcollect.launch.run_folder import LISTENING, RunFolder
from distcollect.launch.worker_hosts import WorkerHosts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    settings = {"name": "test", "num_workers": 1, "num_tasks": 1, "patience_s": 3.0}
    folder.create({**settings, "command": ["python", "train.py"]})
    return folder


def test_a_task_s_own_process_stays_small(run: RunFolder) -> None:
    """Each task has such a process; it must not import torch, which takes hundreds of MB."""
    submitter = Submitter(run, run.path, notice_s=60, max_time_limits=1)
    job = Job("test", trains=False, resources=Resources(), command=["true"])
    file = run.path / "task.pkl"
    file.write_bytes(cloudpickle.dumps(submitter._task(job)))
    code = (
        "import pickle, sys; task = pickle.load(open(sys.argv[1], 'rb')); "
        "assert task.command == ['true'] and task.grace_s == 50, task; "
        "assert not {'torch', 'distcollect'} & sys.modules.keys(); "
        # Submitit saves it once more when its job is requeued.
        "import cloudpickle; cloudpickle.dumps(task.checkpoint())"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)


def test_a_worker_with_a_wrong_token_and_one_with_a_stale_address(run: RunFolder) -> None:
    """Both get an error that says what is wrong, within their deadlines."""
    command = [sys.executable, "-m", "distcollect", "worker", "--run", str(run.path)]
    hosts = WorkerHosts("127.0.0.1", "another", num_expected=1)
    try:
        run.tell(LISTENING, host="127.0.0.1", port=hosts.join_server.port)
        wrong = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        hosts.close()
    assert wrong.returncode == 2
    assert "it doesn't have this run's token" in wrong.stderr
    assert f"is {run.token_file} the run's own?" in wrong.stderr

    began = time.monotonic()
    stale = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert stale.returncode == 2
    assert time.monotonic() - began < 40
    assert "could not reach the trainer within 3 s" in stale.stderr
    assert "the address is stale" in stale.stderr
    assert json.dumps(hosts.join_server.port) in stale.stderr
