"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
import sys


def run_python(*words: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run this Python with these arguments; its exit status is for the caller to check."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
