"""The text for the exit code of a process."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import distcollect
from distcollect.common.process_exit import ProcessExit, describe_exit
from distcollect.roster.process import Process


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "by signal 99")],
)
def test_describe_exit(code: int, text: str) -> None:
    assert text in describe_exit(code)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_stray_connection_is_named_as_a_likely_cause(number: signal.Signals) -> None:
    text = describe_exit(-number)
    assert text.startswith(f"killed by {number.name} ")
    assert "port scanner" in text
    page = (Path(distcollect.__file__).parent / "docs" / "security.md").read_text()
    [title] = re.findall('"(.*)" on the page Security', text)
    assert f"\n## {title}\n" in page
    ended = Process(0, 0, 1, over_rpc=False, exit=ProcessExit(-number, 0))
    assert str(ended.death(left=False)).endswith(f"its process ended: killed by {number.name}")
