"""Starts programs as torchrun and SLURM do, and reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from helpers.paths import SCRIPTS

SCRIPT = SCRIPTS / "collect_launched.py"
BESIDE_A_GROUP = SCRIPTS / "collect_beside_a_group.py"
TRAINERS = SCRIPTS / "train_together.py"
MENDED = SCRIPTS / "lose_a_worker.py"
PUSHED = SCRIPTS / "push_to_hosts.py"
PUSHED_ONCE = SCRIPTS / "push_once_per_host.py"
SERVED = SCRIPTS / "collect_by_servers.py"
COMPARED = SCRIPTS / "compare_with_rank.py"


def finish(processes, timeout_s=110):
    """Wait for all and return their outputs; on any error, kill all."""
    outputs = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=timeout_s)
            outputs.append(out)
            assert process.returncode == 0, out
    finally:
        end(processes)
    return outputs


def end(processes):
    """Kill all that still run, and close their pipes.

    An open pipe would be reported as a warning, which fails the test that happens to run then.
    """
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def told(process, name):
    """Read its output up to a line of JSON with this name; pytest's timeout is the deadline."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f'{{"{name}"'):
            return json.loads(line)[name]
    raise AssertionError("".join(lines))


def tell(process, text=""):
    """Write a line to it."""
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


_started = []


def start(command, cwd=None, **env):
    """Start a program; it is ended when the test is over, at the latest."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _started.append(process)
    return process


def end_all():
    """End what is left of all that was started."""
    end(_started)
    _started.clear()


def report(output):
    lines = [line for line in output.splitlines() if line.startswith('[{"shape"')]
    assert len(lines) == 1, output
    return json.loads(lines[0])


def slurm_variables(rank, num_hosts, per_host):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(num_hosts * per_host),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"node[1-{num_hosts}]",
        "SLURM_STEP_NUM_NODES": str(num_hosts),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x{num_hosts})",
    }


def torchrun(*options, script=SCRIPT):
    return [sys.executable, "-m", "torch.distributed.run", *options, script]
