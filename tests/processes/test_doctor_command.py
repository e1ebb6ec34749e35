"""``distcollect doctor`` on this host; over several hosts see test_hosts.py."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest
from helpers.launching import slurm_variables
from helpers.paths import ROOT
from helpers.transports import needs_rpc

from distcollect.net.interfaces import listen


def test_a_rank_that_finds_nobody() -> None:
    """It reports that, and the address it tried."""
    with listen("127.0.0.1") as taken:  # a port on which nothing listens
        port = taken.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "distcollect", "doctor", "--wait", "0.5"],
        cwd=ROOT,
        env={**os.environ, **slurm_variables(1, 1, 2), "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "rank 1 could not reach the trainer within 0.5 s" in done.stderr


@pytest.mark.parametrize(
    ("transport", "exposed"),
    [
        pytest.param(
            "rpc",
            ["torch's RPC listens at 17 ports of 127.0.0.1", "torch's store listens at 127."],
            marks=needs_rpc,
        ),
        ("tcp", []),
    ],
)
def test_alone_with_few_files_and_a_wrong_interface(transport: str, exposed: list[str]) -> None:
    """The command on one machine: it names what is wrong, and that the rest works."""

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (250, 250))

    done = subprocess.run(
        [sys.executable, "-m", "distcollect", "doctor"],
        cwd=ROOT,
        env={
            **os.environ,
            "NCCL_SOCKET_IFNAME": "nosuch0",
            "DISTCOLLECT_TRANSPORT": transport,
            "DISTCOLLECT_TOKEN_FILE": "/nonexistent",  # here no worker joins from outside
        },
        preexec_fn=few_files,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    found = re.findall(r"^\d+\. (.*): ", said, re.M)
    assert [re.sub(r" \(\S+\)", "", each) for each in found] == [
        "files, rank 0, rank 1",
        "interface, rank 0, rank 1",
    ], said
    assert re.search(
        r"^ +1 +\S+ +[\d.]+ ms +(?:\d+\.\d\d|[\d,]+) MB/s +(?:\d+\.\d\d|[\d,]+) MB/s", said, re.M
    ), said
    assert f"transport={transport!r}: nothing listens for workers that join" in said
    assert all(each in said for each in exposed)
    assert said.count("whoever reaches one may") == len(exposed)
    assert "it may have 250 files open" in said
    assert "what to do: unset NCCL_SOCKET_IFNAME" in said
    assert "Traceback" not in done.stderr
