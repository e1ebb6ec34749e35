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


def loaded_by(code: str) -> list[str]:
    code += "; import sys; print(*sys.modules, sep='\\n')"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()


def test_a_worker_loads_nothing_of_the_trainer() -> None:
    loaded = loaded_by("import distcollect.worker.main")
    assert "distcollect.worker.main" in loaded
    assert [name for name in UNWANTED if name in loaded] == []


def test_ray_is_loaded_when_it_is_used() -> None:
    loaded = loaded_by("import distcollect as dc; dc.RayDataCollector; dc.run(lambda: None)")
    assert "distcollect.integrations.ray.settings" in loaded
    assert "ray" not in loaded
