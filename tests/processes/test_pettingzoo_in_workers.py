"""Envs of PettingZoo in worker processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distcollect as dc

pytest.importorskip("pettingzoo", reason="the pettingzoo extra is not installed")


@pytest.mark.parametrize("sync", [True, False])
def test_a_real_env_in_workers(sync: bool) -> None:
    pytest.importorskip("mpe2", reason="the test extra is not installed")

    def make() -> Any:
        from mpe2 import simple_tag_v3  # noqa: PLC0415

        return simple_tag_v3.parallel_env(max_cycles=5)

    chase, flee = nn.Linear(16, 5), nn.Linear(14, 5)

    def policy(adversary: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
        return {
            "adversary": {"action": chase(adversary["observation"]).argmax(-1)},
            "agent": {"action": flee(agent["observation"]).argmax(-1)},
        }

    settings = {"num_workers": 2, "envs_per_worker": 2, "sync": sync, "frames_per_batch": 40}
    with dc.RPCDataCollector(make, policy, **settings) as collector:
        batch = collector.next()
    assert batch.shape == ((4, 10) if sync else (2, 20))
    seen = batch["adversary", "observation"]
    assert seen.shape == (*batch.shape, 3, 16)
    assert torch.equal(batch["adversary", "action"], chase(seen).argmax(-1))
    rewards = [batch["next", group, "reward"].sum(-2) for group in ("adversary", "agent")]
    torch.testing.assert_close(sum(rewards), batch["next", "reward"])
    assert batch["next", "truncated"][:, 4::5].all()
    assert batch["agent", "mask"].all()
