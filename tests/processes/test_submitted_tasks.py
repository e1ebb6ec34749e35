"""Processes of submitted tasks, without a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from helpers.bad_launches import free_port
from helpers.launching import start

from distcollect.commands.main import main
from distcollect.integrations.slurm.jobs import Job
from distcollect.launch.run_folder import LISTENING, RUN_VARIABLE, TOKEN_VARIABLE, RunFolder
from distcollect.launch.worker_hosts import WorkerHosts


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    settings = {"name": "test", "num_workers": 1, "num_tasks": 1, "patience_s": 3.0}
    folder.create({**settings, "command": ["python", "train.py"]})
    return folder


def test_a_task_s_own_process_stays_small(run: RunFolder) -> None:
    """Each task has such a process; it must not import torch, which takes hundreds of MB."""
    job = Job(run, {"cwd": run.path, "notice_s": 60}, False, ["true"], {})
    file = run.path / "task.pkl"
    file.write_bytes(cloudpickle.dumps(job.task()))
    code = (
        "import pickle, sys; task = pickle.load(open(sys.argv[1], 'rb')); "
        "assert task.command == ['true'] and task.grace_s == 50, task; "
        "assert not {'torch', 'distcollect'} & sys.modules.keys(); "
        # Submitit saves it once more when its job is requeued.
        "import cloudpickle; cloudpickle.dumps(task.checkpoint())"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=60)


def test_a_run_continues_with_the_newest_and_the_best_file_of_the_earlier_one(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "srun", "sinfo", "scontrol"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\necho Submitted batch job 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    resumed = tmp_path / "resumed"
    saved = ["checkpoint.pt", "checkpoint-best.pt"]
    for name in (*saved, "checkpoint-12.pt"):
        (run.path / name).write_text(name)
    options = ["--resume", run.path, "--run-folder", resumed, "--trust-folder", __file__]
    assert main(["submit", *map(str, options)]) == 0
    assert {file.name: file.read_text() for file in resumed.glob("*.pt")} == {n: n for n in saved}


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


_BESIDE = """
import gymnasium as gym


def make():
    return gym.make("CartPole-v1")
"""
_TRAIN = """
import distcollect as dc
from beside import make


def main():
    with dc.RPCDataCollector(make, frames_per_batch=8, sync=True) as collector:
        print("frames:", collector.next().numel())


if __name__ == "__main__":
    dc.run(main)
"""


@pytest.mark.parametrize("knows_folder", [True, False])
def test_modules_beside_the_script(tmp_path: Path, *, knows_folder: bool) -> None:
    """Workers of another job import them too; if they can't, the trainer says so at once."""
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    for folder in (scripts, elsewhere):
        folder.mkdir()
    (scripts / "beside.py").write_text(_BESIDE)
    (scripts / "train.py").write_text(_TRAIN)
    run = RunFolder(tmp_path / "run")
    settings = {"command": [], "num_tasks": 1, "num_workers": 1, "patience_s": 100.0}
    run.create({**settings, **({"script_folder": str(scripts)} if knows_folder else {})})
    trainer = start(
        [sys.executable, scripts / "train.py"],
        cwd=elsewhere,
        **{RUN_VARIABLE: str(run.path), TOKEN_VARIABLE: str(run.token_file)},
        DISTCOLLECT_LISTEN=f"127.0.0.1:{free_port()}",
    )
    worker = start(
        [sys.executable, "-m", "distcollect", "worker", "--run", run.path], cwd=elsewhere
    )
    output, _ = trainer.communicate(timeout=80)
    if knows_folder:
        assert "frames: 8" in output
        assert trainer.returncode == 0
    else:
        assert "No module named 'beside'); what they are made of must be importable" in output
        assert trainer.returncode == 1
    # It tells the workers, too.
    worker.communicate(timeout=60)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As in ``distcollect submit --dry-run | head``."""
    script = tmp_path / "train.py"
    script.touch()
    command = ["submit", "--dry-run", "--trust-folder", "--run-folder", tmp_path / "run", script]
    with subprocess.Popen(
        [sys.executable, "-m", "distcollect", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as shown:
        assert shown.stdout is not None
        assert shown.stderr is not None
        shown.stdout.close()
        assert "Pipe" not in shown.stderr.read()
        assert shown.wait(100) == 128 + signal.SIGPIPE


_PREEMPTED = """
import os
import subprocess
import sys
import threading
import time

import distcollect as dc

workers = []


def start_one():
    options = ["worker", "--run", os.environ["DISTCOLLECT_RUN"]]
    workers.append(subprocess.Popen([sys.executable, "-m", "distcollect", *options]))


def main():
    start_one()
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1) as collector:
        evaluate = lambda: len(collector.evaluate(3).returns)
        for use in evaluate, lambda: [*collector.call("reset")]:
            workers[-1].terminate()
            workers[-1].wait()
            while collector.num_workers:
                time.sleep(0.1)
            threading.Timer(1, start_one).start()
            print("got", use())
        threading.Timer(0.5, workers[-1].kill).start()
        threading.Timer(2, start_one).start()
        print("got", len(collector.evaluate(5000).returns))
    workers[-1].terminate()


if __name__ == "__main__":
    dc.run(main)
"""


def test_evaluate_and_call_wait_for_workers_as_batches_do(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PREEMPTED)
    run.write("run.json", {**run.settings, "patience_s": 100.0})
    trainer = start(
        [sys.executable, tmp_path / "train.py"],
        **{RUN_VARIABLE: str(run.path), TOKEN_VARIABLE: str(run.token_file)},
        DISTCOLLECT_LISTEN=f"127.0.0.1:{free_port()}",
    )
    output, _ = trainer.communicate(timeout=120)
    got = [line for line in output.splitlines() if line.startswith("got")]
    assert got == ["got 3", "got [0]", "got 5000"], output
