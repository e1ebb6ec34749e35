"""TorchRL envs are stepped as its own collectors step them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

import distcollect as dc


@pytest.fixture(scope="module")
def zoo() -> Any:
    """Imported late: it makes multiprocessing spawn, which makes AsyncVectorEnvs slow to start."""
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    import torchrl_zoo  # noqa: PLC0415

    return torchrl_zoo


KIND_NAMES = [
    "plain",
    "batched",
    "serial",
    "parallel",
    "transformed",
    "transformed batched",
    "serial of transformed",
    "done only",
    "no truncated",
    "discrete",
    "one-hot",
    "multi-categorical",
    "binary",
    "agents",
    "serial of agents",
    "gym one-hot",
    "gym discrete",
]


def entries(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    """All of a batch, but for what a collector says of itself."""
    keys = batch.exclude("collector").keys(include_nested=True, leaves_only=True)
    return {key: batch[key] for key in keys}


def is_ours_alone(key: Any, theirs: dict[Any, torch.Tensor]) -> bool:
    """Frames always say whether they were truncated, and always have a reward for the whole env."""
    parts = key if isinstance(key, tuple) else (key,)
    whole = parts == ("next", "reward") and ("next", "agents", "reward") in theirs
    return parts[-1] == "truncated" or whole


def test_every_kind_is_tested(zoo: Any) -> None:
    assert list(zoo.KINDS) == KIND_NAMES


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_the_same_frames_as_from_torchrls_collector(zoo: Any, kind: str) -> None:
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
        assert wanted.keys() <= mine.keys()
        assert all(is_ours_alone(key, wanted) for key in mine.keys() - wanted.keys())
        for key, value in wanted.items():
            assert mine[key].dtype == value.dtype, key
            torch.testing.assert_close(mine[key], value, rtol=0, atol=0, msg=str(key))
