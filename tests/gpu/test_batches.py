"""Batches on the trainer's GPU: as on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.gpu_policies import Pixels, Where

import distcollect as dc
from distcollect.engine.build import build_engine
from distcollect.engine.plan import WorkerPlan
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slabs import new_slab


def rollout(engine: Any, num_steps: int, worker_id: int = 0) -> Rollout:
    slab = new_slab(engine.layout, num_steps)
    engine.collect(slab)
    header = Header(
        worker_id=worker_id,
        incarnation=0,
        sequence=0,
        num_frames=slab.num_frames,
        num_steps=num_steps,
        num_bytes=0,
        policy_version=(0, 0),
    )
    return Rollout(header, slab.tensors(mapped=False))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 3])
def test_memory_is_not_used_again_while_it_is_copied(
    device: torch.device, num_workers: int
) -> None:
    """The GPU is busy, so copies begin long after the next batches were made in pinned memory."""
    engine = build_engine(WorkerPlan(Pixels, 4), traj_ids=itertools.count())
    batches = []
    for _ in range(12):
        rollouts = [rollout(engine, 16, w) for w in range(num_workers)]
        plain = assemble(engine.layout, rollouts).clone()
        if device.type == "cuda":
            torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        batches.append((assemble(engine.layout, rollouts, device=device), plain))
    for there, here in batches:
        assert there["observation"].device.type == device.type
        assert there.names == here.names
        assert there.batch_size == here.batch_size
        assert (there.cpu() == here).all()
    engine.close()


@pytest.mark.long
def test_they_are_ready_on_the_stream_of_the_user(gpu: torch.device) -> None:
    stream = torch.cuda.Stream()
    with (
        torch.cuda.stream(stream),
        dc.SyncDataCollector(
            Pixels, Where().to(gpu), frames_per_batch=64, storing_device="cuda"
        ) as collector,
    ):
        for _ in range(4):
            batch = collector.next()
            mean = batch["observation"].double().mean()
            assert mean.item() == pytest.approx(batch["observation"].cpu().double().mean().item())


@pytest.mark.parametrize("kind", ["in-process", "workers"])
@pytest.mark.long
def test_where_they_are_stored(device: torch.device, kind: str) -> None:
    sizes: dict[str, Any] = {"frames_per_batch": 64, "storing_device": str(device)}
    if kind == "in-process":
        collector: Any = dc.SyncDataCollector("CartPole-v1", None, **sizes)
    else:
        collector = dc.MultiSyncDataCollector("CartPole-v1", None, num_workers=2, **sizes)
    with collector:
        for _ in range(3):
            batch = collector.next()
            assert {v.device.type for v in batch.values(True, True)} == {device.type}
            assert batch.names[-1] == "time"
            ends = batch["next", "done"][..., :-1, 0]
            following = batch["observation"][..., 1:, :]
            assert (batch["next", "observation"][..., :-1, :] == following)[~ends].all()
