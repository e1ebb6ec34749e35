"""A pytest plugin: writes one line of JSON when a test starts, and one when it has ended.

The file is the value of the environment variable OUTCOMES.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["OUTCOMES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"id": nodeid, "outcome": "started"})


def pytest_runtest_logfinish() -> None:
    # A test that failed may have left a collector open: nothing may keep it alive.
    sys.last_type = sys.last_value = sys.last_traceback = None
    gc.collect()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = (yield).get_result()
    # A test that passed can still fail when what it used is torn down.
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else "xfail"
    elif report.failed:
        reason = str(report.longrepr)
    _write(
        {
            "id": item.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "reason": reason[-6000:],
        }
    )
