"""Workers whose EnvPool env gives the results of some rows at a time."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.loopback_pool import loopback_collector

import distcollect as dc

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed")
# Raised by Gymnasium when EnvPool makes its spaces.
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")

N, T = 4, 16


def make_pool() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make_gymnasium("CartPole-v1", num_envs=N, batch_size=2, num_threads=1)


def lean(observation: torch.Tensor) -> torch.Tensor:
    return (observation[:, 2] > 0).long()


@pytest.mark.parametrize("sync", [False, True])
def test_batches_of_workers(sync: bool) -> None:
    num_frames = N * T * (2 if sync else 1)
    with loopback_collector(
        make_pool, lean, frames_per_batch=num_frames, num_workers=2, sync=sync
    ) as collector:
        batches = [collector.next(timeout_s=60) for _ in range(8)]
        frames = collector.ledger.total
    assert all(batch.shape == (N * (2 if sync else 1), T) for batch in batches)
    assert frames.delivered == 8 * num_frames
    assert frames.stepped == frames.delivered + sum(frames.lost.values()) + frames.open
    rows: dict[tuple[int, int], list[torch.Tensor]] = {}
    for batch in batches:
        assert torch.equal(batch["action"], lean(batch["observation"].flatten(0, 1)).view(-1, T))
        for index, row in enumerate(batch):
            place = (int(row["collector", "worker_id"][0]), index % N)
            rows.setdefault(place, []).append(row)
    for parts in rows.values():
        row = torch.cat(parts)
        ids = row["collector", "traj_ids"]
        within = ids[1:] == ids[:-1]
        assert torch.equal(row["next", "observation"][:-1][within], row["observation"][1:][within])
        assert not row["next", "done"][:-1, 0][within].any()


def test_reproducible_is_refused() -> None:
    with (
        pytest.raises(dc.ArgumentError, match="reproducible=True does not work"),
        loopback_collector(
            make_pool, lean, frames_per_batch=N * T, num_workers=1, sync=False, reproducible=True
        ) as collector,
    ):
        collector.next(timeout_s=60)
