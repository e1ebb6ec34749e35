"""The statistics of running collectors."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.countdown_env import Countdown
from helpers.loopback_pool import loopback_collector

import distcollect as dc
from distcollect.results import (
    Stats,
)


class Choose(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


@pytest.mark.parametrize("kind", [None, True, False], ids=["in process", "sync", "async"])
def test_stats_of_a_collector(kind: bool | None, tmp_path: Path) -> None:
    told: list[Stats] = []
    monitor = dc.Monitor(run_dir=tmp_path, callback=told.append, view=False)
    policy = Choose()
    options: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 240, "monitor": monitor}
    if kind is None:
        collector: Any = dc.SyncDataCollector(Countdown, policy, envs_per_worker=2, **options)
    else:
        collector = loopback_collector(
            Countdown, policy, num_workers=2, envs_per_worker=2, sync=kind, **options
        )
    with collector:
        assert collector.stats().elapsed_s == 0
        assert "nothing" in str(collector.verdict()).lower()
        for _ in collector:
            collector.update_policy_weights_(policy)
    stats = collector.stats()
    assert stats.collector == type(collector).__name__
    assert stats.frames == stats.delivered == 240
    assert stats.ended
    assert sum(stats.lag.frames.values()) == 240
    assert sum(worker.frames for worker in stats.workers.values()) == 240
    assert sum(vars(stats.trainer).values()) == pytest.approx(1)
    times = stats.times
    parts = (times.env, times.policy, times.swap, times.other, times.wait)
    assert sum(parts) == pytest.approx(1)
    assert times.env > 0
    assert times.policy > 0
    # 240 frames of at most four envs, which may have collected ahead.
    episodes = stats.episodes
    assert 240 // 5 - 4 <= episodes.count <= (240 + 4 * 24) // 5
    assert (episodes.mean_return, episodes.mean_length) == (10.0, 5.0)
    assert (stats.num_bytes > 0) == (kind is not None)
    assert stats.sync == (kind is not False)
    # Handed out at the end, whatever the pause.
    assert [s.ended for s in told] == [True]
    (line,) = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert Stats.from_dict(json.loads(line)) == told[0] == stats
    assert json.loads(line)["verdict"] == str(collector.verdict())


def test_prometheus_and_what_a_callback_breaks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "distcollect")

    def broken(stats: Stats) -> None:
        raise OSError("no room left")

    monitor = dc.Monitor(prometheus_port=0, callback=broken, every_s=0.01)
    with dc.SyncDataCollector(Countdown, frames_per_batch=10, monitor=monitor) as collector:
        for _ in range(3):
            collector.next()
        (address,) = [r.args[0] for r in caplog.records if "Prometheus" in r.msg]
        url = f"http://127.0.0.1:{address}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    assert "distcollect_frames_total 30\n" in text
    assert 'distcollect_worker_up{worker="0"} 1\n' in text
    assert sum("no room left" in str(record.exc_info) for record in caplog.records) == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)
