"""A collector goes on where another one was."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distcollect as dc


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


def collector(num_workers: int, policy: nn.Module, **kwargs: Any) -> dc.DataCollectorBase:
    given = {"frames_per_batch": 120, "envs_per_worker": 2, **kwargs}
    if num_workers == 0:
        given.pop("staleness", None)
        return dc.SyncDataCollector("CartPole-v1", policy, **given)
    return dc.RPCDataCollector(
        "CartPole-v1", policy, num_workers=num_workers, sync=num_workers == 2, **given
    )


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (0, 2), (2, 0), (0, 0)])
def test_goes_on_with_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    policy = Policy()
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
            # The same seed goes on: it doesn't give the same episodes once more.
            assert not any(
                torch.equal(batch["observation"].flatten(0, -2)[0], b.flatten(0, -2)[0])
                for b in firsts
            )
            batches += 1
            second.update_policy_weights_(policy)
        assert batches == 2
        assert second.frames == 600


def pid_of(collector: dc.RPCDataCollector, worker_id: int) -> int:
    processes = collector._session.workers._processes.values()
    [connection] = [p.connection for p in processes if p.worker_id == worker_id]
    assert connection is not None
    return int(connection.hello["pid"])


def test_replaced_workers_know_where_the_run_was() -> None:
    policy = Policy()
    state = {
        "format": 1,
        "frames": 0,
        "policy_version": 41,
        "next_traj_id": 5 << 40,
        "seed": None,
        "resumes": 0,
    }
    with collector(2, policy) as resumed:
        assert isinstance(resumed, dc.RPCDataCollector)
        resumed.load_state_dict(state)
        before = resumed.next()
        os.kill(pid_of(resumed, 1), signal.SIGKILL)
        while resumed.num_workers == 2:
            resumed.next()
        while resumed.num_workers == 1:
            resumed.next()
        resumed.next()
        after = resumed.next()
        for batch in (before, after):
            assert (batch["collector", "policy_version"] == 41).all()
            assert (batch["collector", "traj_ids"] >= 5 << 40).all()
        mine = after["collector", "worker_id"] == 1
        assert mine.any()
        old = before["collector", "traj_ids"].unique()
        assert not torch.isin(after["collector", "traj_ids"][mine], old).any()


def test_bad_states_are_refused() -> None:
    with collector(0, Policy()) as fresh:
        for bad in ({}, {"format": 99}, None):
            with pytest.raises(dc.ArgumentError, match="no state of a collector"):
                fresh.load_state_dict(bad)  # type: ignore[arg-type]
        state = fresh.state_dict()
        fresh.next()
        with pytest.raises(dc.CollectorStateError, match="before its first batch"):
            fresh.load_state_dict(state)
