"""Runs the examples in ``launch/``, and reads what they write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from helpers.paths import LAUNCH
from helpers.programs import run_python

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def run_example(
    name: str, *arguments: object, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    return run_python(*launcher, LAUNCH / f"{name}.py", *arguments, timeout_s=250)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return the rows of the metrics that a run has written."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def rows_of(
    done: subprocess.CompletedProcess[str], out: Path, *, is_quiet: bool = True
) -> list[dict[str, Any]]:
    """Return the metrics of a run that ended well, without reaching its target.

    ``is_quiet``: nothing else is printed, by workers either, as TorchRL does.
    """
    assert done.returncode == 0, done.stderr
    *others, last = [line for line in done.stdout.splitlines() if line]
    assert last.startswith("not solved: ")
    if is_quiet:
        assert not others
        assert "Error" not in done.stderr
        assert "Warning" not in done.stderr
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    return metrics(out)


def changed(weights: Path, fresh: torch.nn.Module) -> bool:
    """Return True if the weights in a file fit the module, and differ from its own."""
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    fresh.load_state_dict(torch.load(weights, weights_only=True))
    return any(not torch.equal(value, before[key]) for key, value in fresh.state_dict().items())
