"""A worker process loads no more than it needs."""

from __future__ import annotations

from helpers.programs import run_python

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
    loaded = run_python("-c", code, timeout_s=60).stdout.split()
    assert "distcollect.worker.main" in loaded
    assert [name for name in UNWANTED if name in loaded] == []
