"""Statistics of a run, and a file of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from distcollect.results import EpisodeStats, Lags, Stats, TrainerTimes, WorkerStats, WorkerTimes

WORKER = WorkerStats(frames=250, frames_per_s=50.0, times=WorkerTimes(env=0.8, wait=0.2))


STATS = Stats(
    collector="RPCDataCollector",
    elapsed_s=10.0,
    frames=1000,
    total_frames=4000,
    delivered=1000,
    frames_per_s=200.0,
    mean_frames_per_s=100.0,
    lag=Lags({0: 500, 1: 500}),
    episodes=EpisodeStats(7, 21.5, 20.0, 9.0, 30.0),
    trainer=TrainerTimes(train=0.25, collect=0.75),
    times=WorkerTimes(env=0.8, wait=0.2),
    lost={"worker_lost": 12},
    num_restarts=1,
    workers={0: WORKER, 1: replace(WORKER, state="joining", num_restarts=1)},
)


def write(folder: Path, *stats: Stats, rest: str = "") -> None:
    lines = [json.dumps({"time": time.time(), **each.as_dict()}) for each in stats]
    (folder / "stats.jsonl").write_text("".join(f"{line}\n" for line in lines) + rest)
