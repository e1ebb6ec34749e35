"""The arguments of ``distcollect collect``, and the frames it has recorded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

SLOW = "helpers.counted_env:SlowlyCounted-v0"


def arguments(out: Path, **given: Any) -> list[str]:
    given = {"env": SLOW, "frames": 4000, "num_workers": 1, "frames_per_batch": 30, **given}
    named = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return ["collect", *named, f"--out={out}"]


def recorded(out: Path) -> int:
    """The number of frames recorded so far; 0 before the first record."""
    try:
        return json.loads((out / "collect.json").read_text())["frames"]
    except FileNotFoundError:
        return 0


class Turns(nn.Module):
    """A policy for the counted env; it reads two entries of the observation."""

    def forward(self, step: torch.Tensor, episode: torch.Tensor) -> dict[str, torch.Tensor]:
        turn = torch.stack([step % 2, (step + episode[:, 0]) % 3], 1)
        return {"go": (step > 5).long(), "turn": turn}


def scripted(file: Path) -> Path:
    with warnings.catch_warnings():
        # Torch says so of scripts: the first in some versions, the second in others.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.save(torch.jit.script(Turns()), file)
    return file
