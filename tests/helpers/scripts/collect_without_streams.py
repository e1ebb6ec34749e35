"""Collects though its standard streams are closed; writes to a file what came of it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import distcollect as dc
from distcollect.launch import zygote


def collect() -> str:
    with dc.MultiSyncDataCollector(["CartPole-v1"], None, frames_per_batch=32) as collector:
        return f"{collector.next().numel()} frames, zygote: {zygote.pid() is not None}"


if __name__ == "__main__":
    try:
        result = collect()
    except Exception:  # noqa: BLE001 - nobody else would see it
        result = traceback.format_exc()
    Path(sys.argv[1]).write_text(result)
