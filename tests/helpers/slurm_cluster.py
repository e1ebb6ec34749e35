"""A real SLURM cluster on this machine for tests, with a network of its own; see testbed/."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT, SCRIPTS, TESTBED

SCRIPT = SCRIPTS / "train_submitted.py"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd", "ip", "nsenter")

needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(name) for name in NEEDED),
    reason=f"makes a SLURM cluster of network namespaces: needs root and {', '.join(NEEDED)}",
)


def settings() -> dict[str, str]:
    """Names and ports that nothing else on this machine uses."""
    number = os.getpid() % 4096
    state = os.environ.get("DISTCOLLECT_TEST_CLUSTER", f"/run/distcollect-slurm-{os.getpid()}")
    return {
        "DC_STATE": state,
        "DC_PREFIX": f"t{number}",
        # Chaos runs, maybe at the same time, have networks from 10.78 to 10.177.
        "DC_NET": f"10.{200 + number // 256}.{number % 256}",
        "DC_SLURM_PORT": str(_free_ports(4)),
    }


def _free_ports(count: int) -> int:
    """The first of ``count`` consecutive ports on which nothing listens."""
    for first in range(17_000 + os.getpid() % 1000 * 10, 32_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


class SlurmCluster:
    """Three nodes, partitions main, low and high; see testbed/slurm_up.sh."""

    def __init__(self, env: dict[str, str], runs: Path) -> None:
        self.env, self.runs = env, runs
        self._count = 0
        self._without_slurmd: set[str] = set()  # nodes that a test has crashed or stopped

    def new_folder(self) -> Path:
        self._count += 1
        return self.runs / f"run{self._count}"

    def command(self, *command: object, timeout_s: float = 60, check: bool = True) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def node(self, host: str, action: str) -> None:
        """See testbed/slurm_node.sh."""
        self.command(TESTBED / "slurm_node.sh", host, action)
        if action == "start":
            self._without_slurmd.discard(host)
        else:
            self._without_slurmd.add(host)

    def aborted(self) -> list[str]:
        """The nodes whose slurmd has ended by itself."""
        return [
            node
            for node in ("node1", "node2", "node3")
            if node not in self._without_slurmd and not self._has_slurmd(node)
        ]

    def _has_slurmd(self, node: str) -> bool:
        command = [TESTBED / "slurm_node.sh", node, "alive"]
        return subprocess.run(command, timeout=60, check=False).returncode == 0

    def await_idle(self) -> None:
        """Wait until all nodes are up and idle; start the slurmd that have ended by themselves."""
        for node in self.aborted():
            self.node(node, "start")
        self.until(
            lambda: self.command("sinfo", "-hNp", "main", "-o", "%T").split() == ["idle"] * 3, 60
        )

    def until(self, holds: Callable[[], Any], timeout_s: float = 90) -> Any:
        """Wait until ``holds()`` is true, and return its value.

        The test is skipped if SLURM itself has failed.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            if time.monotonic() >= deadline:
                if aborted := self.aborted():
                    pytest.skip(f"slurmd has ended by itself on {', '.join(aborted)}")
                raise AssertionError(f"not within {timeout_s} s\n{self.all_logs()}")
            time.sleep(0.1)
        return found

    def all_logs(self) -> str:
        """All logs, for a test that fails."""
        parts = [self.command("squeue", "-r", check=False)]
        logs = sorted(self.runs.glob("*/logs/*_log.*"))
        parts += [f"==> {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join(parts)


class SubmittedRun:
    """A submitted run, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def job_ids(self) -> list[str]:
        """The ids of its jobs; the trainer's first."""
        jobs = [json.loads(file.read_text()) for file in (self.folder / "jobs").glob("*.json")]
        return [job["id"] for job in sorted(jobs, key=lambda job: job["submitted"])]

    @property
    def said(self) -> list[dict[str, Any]]:
        """What the trainer printed in all its runs, restarts included."""
        log = self.folder / "logs" / f"{self.job_ids[0]}_0_log.out"
        if not log.exists():
            return []
        # The last line may be incomplete.
        lines = log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"event"')]

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [line for line in self.said if line["event"] == "start"]

    @property
    def batches(self) -> list[dict[str, Any]]:
        """What the trainer printed since its last start."""
        life: list[dict[str, Any]] = []
        for line in self.said:
            life = [] if line["event"] == "start" else [*life, line]
        return [line for line in life if line["event"] == "batch"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """The cluster for the tests of one module; it is always shut down."""
    patch = pytest.MonkeyPatch()
    env = settings()
    for name, value in env.items():
        patch.setenv(name, value)
    notes = Path(env["DC_STATE"] + ".env")
    # For the cleanup after this process was killed; see .ci/run.
    notes.write_text("".join(f"export {name}={value}\n" for name, value in env.items()))
    runs = Path(f"{env['DC_STATE']}-runs")
    try:
        up = subprocess.run(
            [TESTBED / "slurm_up.sh"], capture_output=True, text=True, timeout=120, check=False
        )
        if up.returncode:
            pytest.skip(f"this machine can't run the testbed: {up.stderr[-2000:]}")
        patch.setenv("SLURM_CONF", f"{env['DC_STATE']}/slurm/slurm.conf")
        # Jobs import the package that is tested here.
        patch.setenv("PYTHONPATH", str(ROOT))
        runs.mkdir()
        runs.chmod(0o1777)
        yield SlurmCluster(env, runs)
    finally:
        subprocess.run([TESTBED / "slurm_down.sh"], timeout=60, check=False, capture_output=True)
        shutil.rmtree(runs, ignore_errors=True)
        notes.unlink()
        Path(env["DC_STATE"] + ".lock").unlink(missing_ok=True)
        patch.undo()
