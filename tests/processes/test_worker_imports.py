"""A worker process loads no more than it needs."""

from __future__ import annotations

import subprocess
import sys

# What only the trainer's process needs.
UNWANTED = (
    "distcollect.collectors",
    "distcollect.commands",
    "distcollect.launch",
    "distcollect.roster",
    "distcollect.pool",
    "http.server",
    "prometheus_client",
    "ray",
    "rich",
    "submitit",
    "torchrl",
)


def test_a_worker_loads_nothing_of_the_trainer() -> None:
    code = "import distcollect.worker.main, sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    loaded = done.stdout.decode().split()
    assert "distcollect.worker.main" in loaded
    assert [name for name in UNWANTED if name in loaded] == []
