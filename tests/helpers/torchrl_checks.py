"""Compares frames of TorchRL envs with those from TorchRL's own collector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

import distcollect as dc


@pytest.fixture(scope="module")
def zoo() -> Any:
    """Imported late: it sets multiprocessing to spawn, and AsyncVectorEnvs start slowly then."""
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers import torchrl_envs  # noqa: PLC0415

    return torchrl_envs


def entries(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    """All entries of a batch, except those under ``"collector"``."""
    keys = batch.exclude("collector").keys(include_nested=True, leaves_only=True)
    return {key: batch[key] for key in keys}


def check_the_same_frames_as_from_torchrls_collector(zoo: Any, kind: str) -> None:
    make = zoo.KINDS[kind]
    probe = make()
    policy, num_rows = zoo.policy_for(probe), probe.batch_size.numel()
    sizes = {"frames_per_batch": 13 * num_rows, "total_frames": 26 * num_rows}
    reference = zoo.Collector(make(), policy, auto_register_policy_transforms=False, **sizes)
    expected = [batch.clone() for batch in reference]
    reference.shutdown()
    with dc.SyncDataCollector(make(), policy, **sizes) as collector:
        batches = list(collector)
    for ours, theirs in zip(batches, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.names == theirs.names
        mine, wanted = entries(ours), entries(theirs)
        assert wanted.keys() == mine.keys()
        for key in theirs.keys(include_nested=True):
            assert ours.get_item_shape(key) == theirs.get_item_shape(key), key
        for key, value in wanted.items():
            assert mine[key].dtype == value.dtype, key
            torch.testing.assert_close(mine[key], value, rtol=0, atol=0, msg=str(key))
