"""What the doctor finds in reports of hosts."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import distcollect as dc
from distcollect.commands.doctor import checks
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.command import capacity_table
from distcollect.commands.doctor.host_report import (
    HostReport,
    inspect_host,
    read_num_ports,
)
from distcollect.commands.main import main
from distcollect.common.cgroups import read_free_bytes
from distcollect.transport import start


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    assert finding.remedy
    return finding


HERE = inspect_host(0, "127.0.0.1", "rpc")


FAR = replace(
    HERE,
    rank=2,
    host="node2",
    host_id="another",
    interfaces=["lo", "eth0", "eth1"],
    address="10.1.0.2",
    interface="eth1",
    knows_itself=True,
    variables={},
)


def found(report: HostReport, num_hosts: int = 1, num_workers: int = 1, **changed: Any) -> Any:
    return list(checks.check_host(replace(report, **changed), num_hosts, num_workers))


def sharing(report: HostReport, *, mapped: bool = False) -> Any:
    return list(checks.check_sharing(HERE, report, mapped=mapped))


def test_nothing_is_wrong_here() -> None:
    assert not found(replace(HERE, shm_bytes=-1))
    assert not found(FAR, 2, shm_bytes=1 << 30)
    assert not sharing(FAR)
    assert not sharing(HERE, mapped=True)
    assert not list(checks.check_versions([HERE, FAR]))


def test_versions_that_differ() -> None:
    finding = only(checks.check_versions([HERE, replace(FAR, gymnasium="0.29.1")]))
    assert finding.where == "rank 2 (node2)"
    assert finding.problem.startswith("its gymnasium is 0.29.1, the trainer's is ")


TP, NCCL = "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


WRONG: list[tuple[dict[str, Any], str]] = [
    # changes of FAR, and of the numbers of hosts and workers; a regular expression
    ({"variables": {TP: "ib0"}}, f"{TP}=ib0, but the host has no such interface.*unset {TP}"),
    (
        {"num_hosts": 2, "knows_itself": False},
        "'node2' .* none of its .*/etc/hosts.*local-addr=10.1.0.2.*is_host=1.*IFNAME=eth1",
    ),
    ({"shm_bytes": 64 << 20}, "^/dev/shm has 64 MB free"),
    ({"rank": 0, "max_files": 1024, "num_workers": 100}, "1024 files.*some 1856.*ulimit -Hn 4096"),
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"variables": {NCCL: "^docker0,lo", TP: "eth0"}},
    {"variables": {NCCL: "=eth1"}},
    {"knows_itself": False},  # on one host
    {"max_files": 1024, "num_workers": 1000},  # a worker has one trainer
    {"rank": 0, "max_files": 1024},
    {"rank": 0, "max_files": -1, "num_workers": 1000},
]


@pytest.mark.parametrize(("changed", "says"), WRONG)
def test_what_is_wrong(changed: dict[str, Any], says: str) -> None:
    finding = only(found(FAR, **{"shm_bytes": 1 << 30, **changed}))
    assert re.search(says, f"{finding.problem} {finding.remedy}")


@pytest.mark.parametrize("changed", RIGHT)
def test_what_is_right(changed: dict[str, Any]) -> None:
    assert not found(FAR, shm_bytes=1 << 30, **changed)


def test_how_many_workers_a_host_can_serve() -> None:
    report = replace(FAR, num_cores=8, free_bytes=64 << 30, num_ports=28232, max_files=1 << 20)
    unknown = replace(FAR, num_cores=1, free_bytes=-1, num_ports=-1, max_files=100)
    no_limit = replace(unknown, max_files=-1)
    lines = capacity_table([report, unknown, no_limit]).splitlines()
    assert lines[1].split() == ["node2", "8", "2,048", "1,568", "65,520"]
    assert lines[2].split() == ["node2", "1", "?", "?", "0"]
    assert lines[3].split()[-1] == "?"
    # The check agrees with it.
    assert not found(HERE, num_workers=65520, max_files=1 << 20)
    assert found(HERE, num_workers=65521, max_files=1 << 20)


def test_limits_of_a_host_are_read(tmp_path: Path) -> None:
    ports = tmp_path / "range"
    assert read_num_ports(ports) == -1
    ports.write_text("32768\t60999\n")
    assert read_num_ports(ports) == 28232

    meminfo, membership, group = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "job/step"
    group.mkdir(parents=True)

    def free() -> int:
        return read_free_bytes(meminfo, tmp_path, membership)

    assert free() == -1
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert free() == 8000 << 10
    membership.write_text("0::/job/step\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert free() == 8000 << 10
    (group.parent / "memory.max").write_text("5000000\n")
    (group.parent / "memory.current").write_text("2000000\n")
    assert free() == 3000000


def test_memory_of_another_user_can_t_be_mapped() -> None:
    assert "may not map" in only(sharing(replace(HERE, rank=1))).problem


def test_a_survey_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    report = inspect_host(3, "127.0.0.1", "rpc")
    assert HostReport(**asdict(report)) == report  # as it travels
    assert report.interface == "lo"
    assert "lo" in report.interfaces
    assert report.variables == {"GLOO_SOCKET_IFNAME": "lo"}


def test_torch_without_a_private_part(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delattr("torch.distributed.rpc.api._init_rpc_states")
    with monkeypatch.context() as patch:
        patch.setenv("DISTCOLLECT_TRANSPORT", "rpc")
        assert main(["doctor"]) == 2
    assert "lacks _init_rpc_states" in capsys.readouterr().err
    # A run says so too, before any process is started, unless it can do without.
    with pytest.raises(dc.ArgumentError, match="lacks _init_rpc_states; use 'tcp'"):
        dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1, transport="rpc")
    caplog.set_level(logging.INFO)
    assert start.chosen(None) == start.TCP
    assert "transport='tcp', as this torch lacks" in caplog.text
    caplog.clear()
    monkeypatch.setitem(sys.modules, "distcollect.transport.rpc_agents", None)
    assert start.chosen(None) == start.TCP
    assert "transport='tcp', as this torch lacks RPC (" in caplog.text
