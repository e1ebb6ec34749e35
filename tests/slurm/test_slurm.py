"""Runs on a real SLURM cluster of three nodes on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launching import start
from helpers.slurm_cluster import SCRIPT, SlurmCluster, SubmittedRun, cluster, needs_slurm

from distcollect.commands.main import main

__all__ = ["cluster"]

pytestmark = [needs_slurm, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _nothing_left(cluster: SlurmCluster) -> Iterator[None]:
    """Each test begins with a free cluster, whatever the one before did."""
    cluster.await_idle()
    yield
    cluster.command("scancel", "--user=root", "--quiet")


def typed(
    folder: Path, *options: object, script: object = SCRIPT, arguments: Any = ()
) -> list[str]:
    words = ["submit", "--trust-folder", "--run-folder", folder, "--time", 30, *options]
    return [str(word) for word in (*words, script, *arguments)]


def submit(folder: Path, *options: object, arguments: Any = ()) -> SubmittedRun:
    assert main(typed(folder, *options, arguments=arguments)) == 0
    return SubmittedRun(folder)


def status(run: SubmittedRun, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main(["status", str(run.folder)])
    return capsys.readouterr().out


def check_batches(run: SubmittedRun) -> None:
    """Each batch counts once, and used the weights of its version."""
    numbers = [batch["number"] for batch in run.batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    # Each publication makes a version; so does loading the checkpoint.
    begin = run.batches[0]["version"] - numbers[0]
    assert begin in (0, 1)
    for batch in run.batches:
        assert batch["version"] == batch["number"] + begin
        assert batch["frames"] == 240 * batch["number"]
        assert batch["seen"] == [batch["number"] - 1]


def distcollect(words: list[str]) -> subprocess.Popen[str]:
    return start([sys.executable, "-m", "distcollect", *words], cwd="/")


def test_two_runs_at_once(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """One job each; the second fails."""
    good, bad = cluster.new_folder(), cluster.new_folder()
    words = typed(good, "--nodes", 3, "--wait", arguments=["--batches", 40])
    failing = typed(bad, "--nodes", 2, "--wait", arguments=["--fail-at", 3])
    processes = [distcollect(words), distcollect(failing)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert processes[0].returncode == 0, outputs[0]
    run = SubmittedRun(good)
    check_batches(run)
    assert run.said[-1] == {"event": "done", "batches": 40}
    assert run.batches[-1]["workers"] == [0, 1]
    assert re.search(r"trainer +\d+ +COMPLETED ", outputs[0])
    # Only on the cluster's network.
    assert f"at {cluster.env['DC_NET']}." in outputs[0]
    assert (good / "token").stat().st_mode & 0o777 == 0o600
    assert good.stat().st_mode & 0o777 == 0o700

    assert processes[1].returncode == 1, outputs[1]
    assert "FAILED" in outputs[1]
    assert "it failed: exit code 1" in outputs[1]
    # The ends of the failed tasks' logs, and of no others.
    assert "RuntimeError: as it was told to" in outputs[1]
    assert "task 1" not in outputs[1]

    assert main(["status", str(good), str(bad)]) == 1
    assert f"\n\nrun {bad}\n  trainer" in capsys.readouterr().out

    # SLURM forgets a job some minutes after its end; here it never knew this one.
    for folder, failed in ((good, 0), (bad, 1)):
        [file] = (folder / "jobs").iterdir()
        file.write_text(json.dumps({**json.loads(file.read_text()), "id": "1"}))
        assert main(["status", str(folder)]) == failed
        assert re.search(r"trainer +1 +GONE .* 'sacct ", capsys.readouterr().out)


def test_trainer_and_workers_apart(
    cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = cluster.runs / "stop-apart"
    folder = cluster.new_folder()
    # The trainer stays in the queue until it is released.
    held = ["--slurm", "hold", "--worker-jobs", 1, "--worker-slurm", "nodelist=node2"]
    run = submit(folder, *held, arguments=["--until", stop])
    trainer, workers = run.job_ids
    log = folder / "logs" / f"{workers}_0_log.err"
    cluster.until(
        lambda: log.exists() and "waiting up to 3600 s for the trainer" in log.read_text()
    )
    assert "JobHeldUser" in status(run, capsys)
    cluster.command("scontrol", "release", trainer)
    cluster.until(lambda: run.batches)

    # Two more workers join from a job of their own, and get the newest weights.
    more = ["submit", "--add-workers", str(folder), "--worker-jobs", "1", "--worker-tasks", "2"]
    assert main([*more, "--time", "30"]) == 0
    cluster.until(lambda: run.batches[-1]["present"] == 3)
    seen = len(run.batches)
    cluster.until(lambda: {w for b in run.batches[seen:] for w in b["workers"]} == {0, 1, 2})
    shown = status(run, capsys)
    assert len(re.findall(r"(?m)^  workers +\d+ +RUNNING", shown)) == 2
    assert f"at {cluster.env['DC_NET']}." in shown

    stop.touch()
    cluster.until(lambda: not cluster.command("squeue", "-h"), 40)
    check_batches(run)
    assert len(re.findall(r"COMPLETED ", status(run, capsys))) == 3


def test_a_script_that_submits_itself(cluster: SlurmCluster) -> None:
    """``submitit_delayed_launcher``: two jobs of workers serve the decorated ``main()``."""
    folder = cluster.new_folder()
    script = SCRIPT.with_name("train_delayed.py")
    process = start([sys.executable, script, folder], cwd="/")
    cluster.until(lambda: process.poll() is not None)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert re.search(r"trainer +\d+ +COMPLETED ", output)
    assert SubmittedRun(folder).said == [{"event": "done", "frames": 240, "workers": [0, 1]}]


def test_preempted_and_resumed(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Trainer and worker lose their nodes to a job of higher priority, and resume after it."""
    stop = cluster.runs / "stop-preempted"
    low = ["--partition", "low", "--worker-jobs", 1, "--worker-tasks", 2]
    run = submit(cluster.new_folder(), *low, arguments=["--until", stop])
    cluster.until(lambda: len(run.batches) >= 5)
    wanted = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--parsable"]
    cluster.command("sbatch", *wanted, "--wrap", "sleep 2")
    cluster.until(lambda: len(run.starts) == 2)
    begin = run.starts[1]
    assert begin["resumed"]
    *_, last = (b["number"] for b in run.said[: run.said.index(begin)] if b["event"] == "batch")
    # It saves after training on a batch, and reports it then.
    assert begin["batches"] - last in (0, 1)
    cluster.until(lambda: run.batches and run.batches[-1]["present"] == 2)
    shown = status(run, capsys)
    told = r"job \d+ was told to end after \S+ of 00:30:00: its script saved and ended; requeued\n"
    assert re.search(told, shown)
    assert re.search(r"job \d+ was started again, on node\d\n", shown)
    stop.touch()
    cluster.until(lambda: not cluster.command("squeue", "-h"), 40)
    assert run.batches[0]["number"] == begin["batches"] + 1
    check_batches(run)
    assert len(re.findall(r"COMPLETED ", status(run, capsys))) == 2


def test_a_worker_s_node_crashes(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """One job on three nodes: SIGTERM announces a preemption; then a node goes down."""
    stop = cluster.runs / "stop-crashed"
    run = submit(cluster.new_folder(), "--nodes", 3, arguments=["--until", stop])
    cluster.until(lambda: run.batches)
    # Some sites don't send the job's own signal, but SIGTERM to all its processes.
    cluster.command("scancel", "--signal=TERM", run.job_ids[0])
    cluster.until(lambda: len(run.starts) == 2)
    assert run.starts[1]["resumed"]
    cluster.until(lambda: run.batches and run.batches[-1]["present"] == 2)
    assert "was told to end after" in status(run, capsys)
    cluster.node("node3", "crash")
    try:
        cluster.until(lambda: run.batches[-1]["present"] == 1, 40)
        survived = len(run.batches)
        # SLURM notices later than the trainer, and keeps the other nodes running.
        cluster.until(lambda: "node[1-2]" in status(run, capsys), 60)
        cluster.until(lambda: len(run.batches) > survived + 3)
        assert run.batches[-1]["workers"] == [0]
        stop.touch()
        cluster.until(lambda: not cluster.command("squeue", "-h"), 40)
    finally:
        cluster.node("node3", "start")
    check_batches(run)
    assert re.search(r"COMPLETED ", status(run, capsys))


def trains_on_node1(cluster: SlurmCluster, stop: Path) -> SubmittedRun:
    """A run that has saved; its worker is on node3, and its trainer may move to node2."""
    workers = ["--worker-jobs", 1, "--worker-slurm", "nodelist=node3"]
    run = submit(
        cluster.new_folder(), "--slurm", "exclude=node3", *workers, arguments=["--until", stop]
    )
    cluster.until((run.folder / "checkpoint.pt").exists)
    return run


def test_the_trainer_s_node_crashes(
    cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer resumes on another node from its last checkpoint, and its worker finds it."""
    stop = cluster.runs / "stop-moved"
    run = trains_on_node1(cluster, stop)
    cluster.node("node1", "crash")
    try:
        cluster.until(lambda: len(run.starts) == 2)
        assert run.starts[1]["resumed"]
        assert run.starts[1]["batches"] > 0
        cluster.until(lambda: run.batches)
        shown = status(run, capsys)
        assert re.search(r"job \d+ was started again, on node2", shown)
        assert re.search(r"trainer +\d+ +RUNNING +\S+ +node2", shown)
        stop.touch()
        cluster.until(lambda: not cluster.command("squeue", "-h"), 40)
    finally:
        cluster.node("node1", "start")
    check_batches(run)


@pytest.mark.slow
def test_slurm_loses_the_contact_to_a_trainer_that_goes_on(cluster: SlurmCluster) -> None:
    """It starts the trainer again elsewhere. The first one ends, and harms nothing."""
    stop = cluster.runs / "stop-twice"
    run = trains_on_node1(cluster, stop)
    cluster.node("node1", "stop")
    log = run.folder / "logs" / f"{run.job_ids[0]}_0_log.err"
    try:
        cluster.until(lambda: "has started job" in log.read_text())
        cluster.until(lambda: run.batches[-1]["present"] == 1)
        stop.touch()
        cluster.until(lambda: not cluster.command("squeue", "-h"), 40)
    finally:
        cluster.node("node1", "start")
    assert run.said[-1]["event"] == "done"
    assert run.folder.joinpath("trainer.json").read_text().count("it is done") == 1


def test_cancel(cluster: SlurmCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a worker that waits for the trainer: its wait ends, also with a wrong token."""
    folder = cluster.new_folder()
    workers = ["--worker-jobs", 1, "--worker-slurm", "nodelist=node1", "--patience", 2]
    run = submit(folder, "--slurm", "hold", *workers)
    failed = folder / "failed" / f"{run.job_ids[1]}_0.json"
    cluster.until(failed.is_file)
    shown = status(run, capsys)
    assert "could not reach the trainer within 2 s" in shown
    assert "the trainer has not started yet" in shown
    assert main(["cancel", str(folder)]) == 0
    cluster.until(lambda: "CANCELLED" in status(run, capsys))
    assert "it was cancelled" in status(run, capsys)
    late = distcollect(["worker", "--run", str(folder)])
    assert "the run is over: it was cancelled" in late.communicate(timeout=60)[0]
    assert late.returncode == 0
    more = ["submit", "--add-workers", str(folder), "--worker-jobs", "1"]
    assert main(more) == 2
    assert "is over: it was cancelled" in capsys.readouterr().err
    (folder / "checkpoint.pt").write_text("saved")
    resumed = cluster.new_folder()
    submit(resumed, "--slurm", "hold", "--resume", folder)
    assert (resumed / "checkpoint.pt").read_text() == "saved"
    other = cluster.new_folder()
    submit(other, "--slurm", "hold")
    assert main(["cancel", str(resumed), str(other)]) == 0
    assert capsys.readouterr().out.count("cancelled: job(s)") == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--partition", "gpus"], "invalid partition specified: gpus"),
        (["--nodes", 4], "would not run the trainer"),
        (["--cpus-per-task", 400], "requested:\n(?s:.*)  #SBATCH --cpus-per-task=400"),
        (["--gpus-per-node", 3], "would not run the trainer"),
        (["--mem-gb", 900], "would not run the trainer"),
        (["--worker-jobs", 1, "--worker-partition", "none"], "would not run the workers: "),
        (["--slurm", "account=nobodys", "--slurm", "nonsense=1"], "would not run the trainer"),
    ],
)
def test_what_can_never_run_is_not_submitted(
    cluster: SlurmCluster,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    complaint: str,
) -> None:
    folder = cluster.new_folder()
    assert main(typed(folder, *options)) == 2
    assert re.search(complaint, capsys.readouterr().err)
    assert not folder.exists()
