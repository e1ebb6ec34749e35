"""``run(main)`` under each launcher; several hosts are network namespaces on this machine."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from helpers.paths import SCRIPTS, TESTBED

SCRIPT = SCRIPTS / "launched.py"
TRAINERS = SCRIPTS / "trainers.py"
MENDED = SCRIPTS / "mended.py"
NUM_HOSTS = 3

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("ss"),
    reason="makes network namespaces: needs root and iproute2",
)
needs_ss = pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of iproute2")


def finish(processes, timeout_s=110):
    """Wait for all; their outputs. Ends them whatever happens."""
    outputs = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=timeout_s)
            outputs.append(out)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return outputs


def start(command, **env):
    return subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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


@pytest.fixture(scope="module")
def on_host(three_hosts):
    """A function that prefixes a command so that it runs on host 1, 2 or 3."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in three_hosts.env.items():
            patch.setenv(*variable)
        yield lambda host, *command: [*three_hosts.on(host), *command]


def torchrun(*options):
    return [sys.executable, "-m", "torch.distributed.run", *options, SCRIPT]


@needs_ss
def test_torchrun_on_one_host():
    [output] = finish([start(torchrun("--standalone", "--nproc-per-node=3"))])
    for seen in report(output):
        assert seen["shape"] == [4, 60]
        assert seen["workers"] == [0, 1]
        assert seen["workers whose memory is mapped"] == 2
        assert seen["listening"] == ["127.0.0.1"]


@needs_ss
def test_slurm_variables_on_one_host():
    ranks = [start([sys.executable, SCRIPT], **slurm_variables(rank, 1, 3)) for rank in range(3)]
    for seen in report(finish(ranks)[0]):
        assert seen["workers"] == [0, 1]
        assert seen["listening"] == ["127.0.0.1"]


@needs_hosts
def test_torchrun_on_three_hosts(on_host):
    options = ["--nnodes=3", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=node1:29511", "--rdzv-id=test"]
    hosts = range(1, NUM_HOSTS + 1)
    outputs = finish([start(on_host(host, *torchrun(*options))) for host in hosts])
    # torchrun may put rank 0 on any of the hosts.
    [seen_twice] = [report(output) for output in outputs if '[{"shape"' in output]
    for seen in seen_twice:
        assert seen["workers"] == [0, 1]
        # They have process ids of their own, so they can't be mistaken for this host's.
        assert seen["workers whose memory is mapped"] == 0
        assert seen["listening"] in [[f"{os.environ['DC_NET']}.{host}"] for host in hosts]


@needs_hosts
def test_slurm_variables_on_three_hosts(on_host):
    ranks = [
        start(on_host(1 + rank // 2, sys.executable, SCRIPT), **slurm_variables(rank, NUM_HOSTS, 2))
        for rank in range(2 * NUM_HOSTS)
    ]
    for seen in report(finish(ranks)[0]):
        assert seen["workers"] == [0, 1, 2, 3, 4]
        assert seen["listening"] == [f"{os.environ['DC_NET']}.1"]


def test_torchrun_never_sees_a_worker_die():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    [output] = finish([start([*command, "--nproc-per-node=3", MENDED, "kill"])])
    assert "mended" in output.splitlines()


@needs_hosts
def test_a_host_that_was_unplugged_comes_back(on_host):
    ranks = [
        start(on_host(1 + rank, sys.executable, MENDED, "unplug"), **slurm_variables(rank, 3, 1))
        for rank in range(3)
    ]
    plug = [TESTBED / "netns_host.sh", "3"]
    try:
        await_line(ranks[0], "running")
        subprocess.run([*plug, "unplug"], check=True, timeout=20)
        began = time.monotonic()
        await_line(ranks[0], "lost")
        assert time.monotonic() - began < 12
    finally:
        subprocess.run([*plug, "plug"], check=True, timeout=20)
    outputs = finish(ranks)
    assert "mended" in outputs[0].splitlines()


def await_line(process, wanted):
    """Read its output up to a line; pytest's own timeout is the deadline."""
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"{wanted!r} never came")


def check_trainers(output):
    [line] = [line for line in output.splitlines() if line.startswith('{"trainers"')]
    trainers = json.loads(line)["trainers"]
    assert [workers for workers, _ in trainers] == [2, 1]
    for _, seen in trainers:
        # One publication for all, of what they trained together.
        assert [versions for _, versions, _ in seen] == [[0], [1], [2]]
        assert [weights for _, _, weights in seen] == [[0], [2], [4]]
    first, second = ({i for ids, _, _ in seen for i in ids} for _, seen in trainers)
    assert not first & second


def test_two_trainers_by_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    [output] = finish([start([*command, "--nproc-per-node=5", TRAINERS])])
    check_trainers(output)


def test_two_trainers_by_slurm_variables():
    ranks = [start([sys.executable, TRAINERS], **slurm_variables(rank, 1, 5)) for rank in range(5)]
    check_trainers(finish(ranks)[0])


@needs_hosts
def test_two_trainers_on_three_hosts(on_host):
    options = ["-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=2"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29512", "--rdzv-id=trainers"]
    hosts = range(1, NUM_HOSTS + 1)
    command = [sys.executable, *options, TRAINERS]
    outputs = finish([start(on_host(host, *command)) for host in hosts])
    [output] = [output for output in outputs if '{"trainers"' in output]
    workers = json.loads(output[output.index('{"trainers"') :].splitlines()[0])["trainers"]
    assert [count for count, _ in workers] == [2, 2]
