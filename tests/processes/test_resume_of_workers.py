"""A collector with workers resumes from the state of another one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.policies import ConstantPolicy
from helpers.resuming import check_goes_on_with_another_number_of_workers, collector
from tensordict import TensorDictBase

import distcollect as dc


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (0, 2), (2, 0)])
def test_goes_on_with_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    check_goes_on_with_another_number_of_workers(tmp_path, before, after)


def pid_of(collector: dc.RPCDataCollector, worker_id: int) -> int:
    processes = collector._session.workers._lifecycle.processes.values()
    [connection] = [p.connection for p in processes if p.worker_id == worker_id]
    assert connection is not None
    return int(connection.hello.pid)


def block_of_worker_1(batch: TensorDictBase) -> set[int]:
    """Of its trajectory ids; each process has a block of its own."""
    ids = batch["collector", "traj_ids"][batch["collector", "worker_id"] == 1]
    return {int(traj_id) >> 34 for traj_id in ids}


def test_replaced_workers_know_where_the_run_was() -> None:
    policy = ConstantPolicy()
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
        deadline = time.monotonic() + 60
        while not block_of_worker_1(after := resumed.next()) - block_of_worker_1(before):
            assert time.monotonic() < deadline, resumed.worker_states
        for batch in (before, after):
            assert (batch["collector", "policy_version"] == 41).all()
            assert (batch["collector", "traj_ids"] >= 5 << 40).all()
        mine = after["collector", "worker_id"] == 1
        assert mine.any()
        old = before["collector", "traj_ids"].unique()
        assert not torch.isin(after["collector", "traj_ids"][mine], old).any()
