"""A collector with workers resumes from the state of another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.envs import PidCartPole as Env
from helpers.policies import ConstantPolicy
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collector(num_workers: int, policy: nn.Module, **kwargs: Any) -> dc.DataCollectorBase:
    given = {"frames_per_batch": 120, "envs_per_worker": 2, **kwargs}
    if num_workers == 0:
        given.pop("staleness", None)
        return dc.SyncDataCollector("CartPole-v1", policy, **given)
    return dc.RPCDataCollector(Env, policy, num_workers=num_workers, sync=num_workers == 2, **given)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (0, 2), (2, 0)])
def test_goes_on_with_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    policy = ConstantPolicy()
    ids: set[int] = set()
    firsts = []
    saved = tmp_path / "state.json"
    with collector(before, policy) as first:
        first.set_seed(3)
        for _ in range(3):
            batch = first.next()
            first.update_policy_weights_(policy)
            ids |= set(batch["collector", "traj_ids"].unique().tolist())
            firsts.append(batch["observation"])
        saved.write_text(json.dumps(first.state_dict()))
    state = json.loads(saved.read_text())
    assert (state["frames"], state["policy_version"]) == (360, 3)

    with collector(after, policy, total_frames=600, staleness=dc.Staleness(0, "drop")) as second:
        second.load_state_dict(state)
        assert (second.frames, second.policy_version) == (360, 3)
        batches = 0
        for batch in second:
            assert (batch["collector", "policy_version"] == 3 + batches).all()
            assert second.version_lag == (0, 0, 0)
            assert not ids & set(batch["collector", "traj_ids"].unique().tolist())
            # The seed's sequence goes on: the same episodes do not come again.
            assert not any(
                torch.equal(batch["observation"].flatten(0, -2)[0], b.flatten(0, -2)[0])
                for b in firsts
            )
            batches += 1
            second.update_policy_weights_(policy)
        assert batches == 2
        assert second.frames == 600
