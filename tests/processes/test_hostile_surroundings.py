"""Workers run where the system is in their way."""

from __future__ import annotations

import platform

import pytest
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.programs import run_python

WAIT_S = 120


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for x86_64")
def test_workers_start_where_the_kernel_refuses_memory_files(marked: Marked) -> None:
    done = run_python(SCRIPTS / "collect_in_sandbox.py", timeout_s=WAIT_S)
    assert done.stdout == "frames: 32\n", done.stderr
    assert marked.gone(), marked.left()
