"""Collecting under torchrun and SLURM on three hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from helpers.launching import (
    COMPARED,
    MENDED,
    PUSHED,
    PUSHED_ONCE,
    SERVED,
    TRAINERS,
    finish,
    slurm_variables,
    start,
    tell,
    told,
)
from helpers.paths import TESTBED

NUM_HOSTS = 3
# The other transport before each release only: so many ranks take long to start.
over_each = pytest.mark.parametrize(
    "transport", ["tcp", pytest.param("rpc", marks=pytest.mark.slow)]
)

pytestmark = [
    pytest.mark.usefixtures("marked"),  # whose end kills what a failed test leaves
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("ss"),
        reason="makes network namespaces: needs root and iproute2",
    ),
]


@pytest.fixture(scope="module")
def on_host(three_hosts):
    """A function that prefixes a command so that it runs on host 1, 2 or 3."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in three_hosts.env.items():
            patch.setenv(*variable)
        yield lambda host, *command: [*three_hosts.on(host), *command]


def test_a_host_that_was_unplugged_comes_back(on_host):
    ranks = [
        start(on_host(1 + rank, sys.executable, MENDED), **slurm_variables(rank, 3, 1))
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


@pytest.mark.timeout(400)  # six ranks start, which takes long on a busy machine
def test_a_host_that_vanishes_while_it_receives_weights_leaves_the_others_in_one_group(on_host):
    """Its connections stay open, and nothing comes from it any more."""
    ranks = [
        start(on_host(1 + rank // 2, sys.executable, PUSHED), **slurm_variables(rank, 3, 2))
        for rank in range(6)
    ]
    plug = [TESTBED / "netns_host.sh", "3"]
    try:
        await_line(ranks[0], "sending")
        subprocess.run([*plug, "unplug"], check=True, timeout=20)
        tell(ranks[0])
        said = json.loads(next(line for line in ranks[0].stdout if line.startswith('{"groups"')))
        subprocess.run([*plug, "plug"], check=True, timeout=20)
        [first, second] = said["groups"]
        assert first == [0, 1, 2, 3, 4]
        # Worker 1 may have had it before.
        assert {0, 2} <= set(second) <= {0, 1, 2}
        assert said["acknowledged"] == [0, 1, 2]
        assert said["left_out"] == {"3": "WeightsTimeout", "4": "WeightsTimeout"}
        tell(ranks[0])
    except BaseException:
        subprocess.run([*plug, "plug"], check=True, timeout=20)
        for rank in ranks:
            rank.kill()
            rank.communicate()
        raise
    outputs = finish(ranks)
    assert "done" in outputs[0].splitlines()


@pytest.mark.timeout(400)  # nine ranks start, which takes long on a busy machine
@over_each
def test_weights_travel_once_to_each_host(on_host, monkeypatch, transport):
    """To three workers there; also if the one that passes them on dies while it does."""
    monkeypatch.setenv("DISTCOLLECT_TRANSPORT", transport)
    host = [TESTBED / "netns_host.sh", "1", "rate"]
    subprocess.run([*host, "100mbit"], check=True, timeout=20)
    try:
        ranks = [
            start(
                on_host(1 + rank // 3, sys.executable, PUSHED_ONCE),
                **slurm_variables(rank, NUM_HOSTS, 3),
            )
            for rank in range(3 * NUM_HOSTS)
        ]
        outputs = finish(ranks, timeout_s=300)
    finally:
        subprocess.run([*host, "off"], check=True, timeout=20)
    told = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))
    assert 1 < told["copies_of_plan"] < 1.1
    assert 1 < told["copies"] < 1.05
    assert told["acknowledged"] == [*range(8)]
    assert told["copies_with_a_death"] < 2.6, "one attempt more, and one for the replacement"
    # The process that replaces the relay may have it as well.
    assert {*range(8)} - {2} <= {*told["acknowledged_with_a_death"]}


def finish_anyway(ranks):
    """End all of them, of whom some were killed."""
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(20)
        rank.kill()
        rank.communicate()


def await_line(process, wanted):
    """Read its output up to this line; pytest's timeout is the deadline."""
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"{wanted!r} never came")


@pytest.mark.timeout(400)
def test_each_host_has_an_inference_server_that_outlives_who_started_it(on_host):
    """One host has the trainer and a worker, the other two workers."""
    ranks = [
        start(on_host(1 + rank // 2, sys.executable, SERVED), **slurm_variables(rank, 2, 2))
        for rank in range(4)
    ]

    def kill(host, pid):
        subprocess.run(on_host(host, "kill", "-9", str(pid)), check=True, timeout=20)
        tell(ranks[0], "go on")
        return told(ranks[0], "served")

    try:
        first = told(ranks[0], "served")
        assert [place[0] for place, _ in first.values()] == [1, 2, 2]
        assert all(place[0] == server[0] for place, server in first.values())
        assert first["1"][1] == first["2"][1]
        # The server of host 2 dies: the same workers go on with another one.
        second = kill(2, first["1"][1][2])
        assert [place for place, _ in second.values()] == [place for place, _ in first.values()]
        assert second["0"] == first["0"]
        assert second["1"][1] == second["2"][1] != first["1"][1]
        # With the supervisor that started it a worker ends; the other one starts a server.
        third = kill(2, second["1"][1][1])
        [other] = [w for w in ("1", "2") if second[w][0][1] != second["1"][1][1]]
        assert third.keys() == {"0", other}
        assert third["0"] == first["0"]
        assert third[other][0] == first[other][0]
        assert third[other][1][:2] == first[other][0][:2]
        tell(ranks[0])
        [*_, end] = ranks[0].communicate(timeout=60)[0].splitlines()
    finally:
        finish_anyway(ranks)
    assert json.loads(end)["workers"] == [0, 1, 2]
    assert set(json.loads(end)["lost"]) <= {"worker_lost", "shut_down"}


@pytest.mark.timeout(400)
@over_each
def test_the_inference_server_of_a_rank_serves_workers_of_other_hosts(on_host, transport):
    """It is on the second host, with two workers; the third one is on the trainer's host."""
    given = {"SERVER_RANKS": "3", "DISTCOLLECT_TRANSPORT": transport}
    ranks = [
        start(
            on_host(1 + rank // 2, sys.executable, SERVED), **slurm_variables(rank, 2, 2), **given
        )
        for rank in range(4)
    ]
    try:
        first = told(ranks[0], "served")
        assert [place[0] for place, _ in first.values()] == [1, 2, 2]
        [server] = {tuple(server) for _, server in first.values()}
        assert server[0] == 2
        subprocess.run(on_host(2, "kill", "-9", str(server[2])), check=True, timeout=20)
        tell(ranks[0], "go on")
        second = told(ranks[0], "served")
        assert [place for place, _ in second.values()] == [place for place, _ in first.values()]
        [another] = {tuple(server) for _, server in second.values()}
        assert another[0] == 2
        tell(ranks[0])
        [*_, end] = ranks[0].communicate(timeout=60)[0].splitlines()
    finally:
        finish_anyway(ranks)
    assert json.loads(end)["workers"] == [0, 1, 2]
    assert set(json.loads(end)["lost"]) <= {"shut_down"}


def test_frames_are_the_same_if_the_server_of_another_host_chooses_actions(on_host):
    """Recurrent, seeded, with a server for the worker of the trainer's host and two others."""
    ranks = [
        start(on_host(1 + rank // 2, sys.executable, COMPARED), **slurm_variables(rank, 2, 2))
        for rank in range(4)
    ]
    assert "3 workers: the same" in finish(ranks)[0]


@pytest.mark.slow  # processes/test_launch.py has two trainers on one host
@pytest.mark.parametrize("transport", ["rpc", "tcp"])
def test_two_trainers_on_three_hosts(on_host, monkeypatch, transport):
    monkeypatch.setenv("DISTCOLLECT_TRANSPORT", transport)
    options = ["-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=2"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29512", "--rdzv-id=trainers"]
    hosts = range(1, NUM_HOSTS + 1)
    command = [sys.executable, *options, TRAINERS]
    outputs = finish([start(on_host(host, *command)) for host in hosts])
    [output] = [output for output in outputs if '{"trainers"' in output]
    workers = json.loads(output[output.index('{"trainers"') :].splitlines()[0])["trainers"]
    assert [count for count, _ in workers] == [2, 2]
