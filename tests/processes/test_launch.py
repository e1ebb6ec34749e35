"""``run(main)`` under each launcher; several hosts are network namespaces on this machine."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys

import pytest
import submitit
from helpers.launching import (
    BESIDE_A_GROUP,
    SCRIPT,
    SERVED,
    TRAINERS,
    finish,
    report,
    slurm_variables,
    start,
    tell,
    told,
    torchrun,
)
from helpers.paths import TESTS

pytestmark = pytest.mark.usefixtures("marked")  # whose end kills what a failed test leaves
needs_ss = pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of iproute2")


@needs_ss
def test_torchrun_on_one_host():
    [output] = finish([start(torchrun("--standalone", "--nproc-per-node=3"))])
    for seen in report(output):
        assert seen["shape"] == [4, 60]
        assert seen["workers"] == [0, 1]
        assert seen["workers whose memory is mapped"] == 2
        assert seen["listening"] == ["127.0.0.1"]


@pytest.mark.slow  # tests/hosts has two ranks of one host that share a server, and one apart
def test_ranks_of_torchrun_on_one_host_share_an_inference_server():
    launch = start(torchrun("--standalone", "--nproc-per-node=4", script=SERVED))
    first = told(launch, "served")
    [server] = {tuple(server) for _, server in first.values()}
    assert len({rank for (_, rank, _), _ in first.values()}) == len(first) == 3
    os.kill(server[2], signal.SIGKILL)
    tell(launch, "go on")
    second = told(launch, "served")
    assert {w: place for w, (place, _) in second.items()} == {
        w: place for w, (place, _) in first.items()
    }
    [other] = {tuple(server) for _, server in second.values()}
    assert other != server
    tell(launch)
    assert json.loads(finish([launch])[0].splitlines()[-1]) == {"lost": {}, "workers": [0, 1, 2]}


@needs_ss
@pytest.mark.slow  # test_without_rpc.py runs it each time
def test_slurm_variables_on_one_host():
    ranks = [start([sys.executable, SCRIPT], **slurm_variables(rank, 1, 2)) for rank in range(2)]
    for seen in report(finish(ranks)[0]):
        assert seen["workers"] == [0]
        assert seen["listening"] == ["127.0.0.1"]


@needs_ss
@pytest.mark.timeout(300)
def test_submitits_local_executor(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    executor = submitit.LocalExecutor(folder=tmp_path)
    executor.update_parameters(tasks_per_node=2, timeout_min=4)
    script = str(SCRIPT)

    def run_script():
        runpy.run_path(script, run_name="__main__")

    job = executor.submit(run_script)
    try:
        job.results()
    finally:
        job.cancel()
    trainer, worker = [job.task(rank).stdout() for rank in range(2)]
    assert '[{"shape"' not in worker, worker
    for seen in report(trainer):
        assert seen["workers"] == [0]
        assert seen["listening"] == ["127.0.0.1"]


_PLAIN_SCRIPT = """
import sys
import gymnasium
import distcollect as dc

def make():
    return gymnasium.make("CartPole-v1")

if __name__ == "__main__":
    collector = dc.RPCDataCollector(
        [make] * 2, frames_per_batch=int(sys.argv[1]), total_frames=80, sync=True,
        launcher="submitit", slurm_kwargs={"timeout_min": 1},
    )
    shapes = [tuple(batch.shape) for batch in collector]
    collector.shutdown()
    print(sys.argv[0], shapes, flush=True)
    exit()
"""


def test_a_script_that_knows_no_launch(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(_PLAIN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    [output] = finish([start([*command, "-m", "distcollect", "run", script, "40"])])
    assert f"{script} [(2, 20), (2, 20)]" in output.splitlines()


def check_trainers(output, num_workers):
    [line] = [line for line in output.splitlines() if line.startswith('{"trainers"')]
    trainers = json.loads(line)["trainers"]
    assert [workers for workers, _ in trainers] == num_workers
    for _, seen in trainers:
        # All trainers publish the weights that they trained together.
        assert [versions for _, versions, _ in seen] == [[0], [1], [2]]
        assert [weights for _, _, weights in seen] == [[0], [2], [4]]
    first, second = ({i for ids, _, _ in seen for i in ids} for _, seen in trainers)
    assert not first & second


def test_two_trainers_by_slurm_variables():
    ranks = [start([sys.executable, TRAINERS], **slurm_variables(rank, 1, 4)) for rank in range(4)]
    check_trainers(finish(ranks)[0], [1, 1])


@pytest.mark.slow  # test_without_rpc.py runs it each time
def test_a_process_group_and_what_is_beside_it():
    """TorchRL's collector of that name: one connection for each worker, and nobody listens more."""
    command = torchrun("--standalone", "--nproc-per-node=3", script=BESIDE_A_GROUP)
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    [output] = finish([start(command, PYTHONPATH=path)])
    [line] = [line for line in output.splitlines() if line.startswith("{")]
    assert json.loads(line) == {
        "ports": [],
        "ports of workers": [[], []],
        "connections of workers": [1, 1],
    }
