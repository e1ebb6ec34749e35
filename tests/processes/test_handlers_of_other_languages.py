"""Signal handlers that were set before Python began, as by a program that embeds it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.programs import run_python

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

HANDLER = """
#include <signal.h>
static void ignore(int number) {}
__attribute__((constructor)) static void begin(void) { signal(SIGUSR2, ignore); }
"""

# A forked child of a process with a Checkpoint no longer notes the signals.
SCRIPT = """
import os, signal, sys
from torch import nn
import distcollect as dc
dc.Checkpoint(sys.argv[1] + "/checkpoint.pt", every_s=60, part=nn.Linear(1, 1))
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    os._exit(0)
print("the child:", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_restores_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handler.c").write_text(HANDLER)
    library = tmp_path / "handler.so"
    build = ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "handler.c"]
    subprocess.run(build, check=True, timeout=60)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    done = run_python("-c", SCRIPT, tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert "TypeError" not in done.stderr
    assert done.stdout.strip() == "the child: -12"
