"""What the tests on a GPU share; they run on the CPU where no device is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_results: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where policies compute: cuda or cpu; all tests run then")
    parser.addoption("--results", type=Path, help="a file for the outcome of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: only where a device was named")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a device, only what takes little time runs."""
    if config.getoption("--device", None):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="tests/gpu/run, or --device cpu, runs it"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where policies compute."""
    return torch.device(request.config.getoption("--device", None) or "cpu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The GPU; skips the test if there is none."""
    if device.type != "cuda":
        pytest.skip("only on a GPU")
    return device


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        _results.append(
            {
                "test": item.nodeid,
                "outcome": report.outcome,
                "seconds": round(call.duration, 2),
                "text": report.longreprtext if report.failed else _reason(report),
            }
        )
        # Written each time: the run may be cut short.
        path = item.config.getoption("--results", None)
        if path is not None:
            path.write_text(json.dumps(_results, indent=1))
    return report


def _reason(report: Any) -> str:
    return str(report.longrepr[2]) if report.skipped else ""
