"""What the doctor reports of this host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import pytest

import distcollect as dc
from distcollect.commands.doctor import checks
from distcollect.commands.doctor.checks import Finding
from distcollect.commands.doctor.host_report import HostReport, inspect_host
from distcollect.transport.start import missing_parts


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    assert finding.remedy
    return finding


def test_a_survey_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    report = inspect_host(3, "127.0.0.1")
    assert HostReport(**asdict(report)) == report  # as it travels
    assert report.interface == "lo"
    assert "127.0.0.1" in report.interfaces["lo"]
    assert report.variables == {"GLOO_SOCKET_IFNAME": "lo"}
    assert not report.problems
    assert (
        inspect_host(3, "203.0.113.1").problems["ports"].startswith("can't listen on 203.0.113.1")
    )


def test_torch_without_a_private_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_parts() == []
    monkeypatch.delattr("torch.distributed.rpc.api._init_rpc_states")
    assert (
        "lacks _init_rpc_states"
        in only(checks.check_host(inspect_host(0, "127.0.0.1"), 1, 1)).problem
    )
    # A run says so too, before any process is started.
    with pytest.raises(dc.LaunchError, match="lacks _init_rpc_states"):
        dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1)


def test_ports_that_are_taken_by_nobody_here() -> None:
    report = inspect_host(0, "203.0.113.1")
    assert "203.0.113.1" in next(
        f.problem for f in checks.check_host(report, 1, 1) if f.topic == "ports"
    )
