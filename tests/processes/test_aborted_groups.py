"""Workers that die in a broadcast whose backend doesn't notice it, as NCCL's does not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from helpers import nccl_stand_in
from helpers.envs import ProcessIdEnv
from helpers.nccl_stand_in import HALFWAY_VARIABLE, NAME
from helpers.publishing import Telling, told
from helpers.waiting import eventually

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules
nccl_stand_in.register()


def push_while_one_dies(
    collector: dc.RPCDataCollector, policy: Telling, kill: Callable[[int], Any]
) -> None:
    """Push; ``kill``, which gets worker 1's process id, is called before the payload is sent."""
    batch = collector.next()
    victim = int(batch["observation"][1, -1, 0])
    send = collector._session.updater.send

    def kill_first(payload: torch.Tensor) -> None:
        collector._session.updater.send = send  # type: ignore[method-assign]
        kill(victim)
        send(payload)

    collector._session.updater.send = kill_first  # type: ignore[method-assign]
    begin = time.monotonic()
    handle = collector.update_policy_weights_(policy, wait=False)
    assert handle is not None
    eventually(lambda: {0, 2} <= handle.acknowledged.keys() and handle.done(), about=lambda: handle)
    assert time.monotonic() - begin < 30, "no timeout has to pass"
    version = handle.version
    assert {handle.acknowledged[w] for w in (0, 2)} == {version}
    if 1 in handle.left_out:  # the process that replaces it may be there already
        assert isinstance(handle.left_out[1], dc.WorkerLost)
        assert handle.left_out[1].worker_id == 1
    batch = collector.next()
    assert (batch["collector", "policy_version"] == version).all()
    weight = float(policy.wide.detach()[0])
    assert [told(batch, row)["wide"] for row in range(3)] == [weight] * 3
    assert int(batch["observation"][1, -1, 0]) != victim


def test_one_that_dies_while_members_are_connected_and_one_in_mid_push(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = Telling()
    halfway = tmp_path / "halfway"
    with dc.RPCDataCollector(
        ProcessIdEnv,
        policy,
        num_workers=3,
        frames_per_batch=12,
        sync=True,
        init_fn=nccl_stand_in.register,
        weight_sync=dc.WeightSync(backend=NAME),
    ) as collector:
        push_while_one_dies(collector, policy.fill(1), lambda pid: os.kill(pid, signal.SIGKILL))

        def kill_halfway(pid: int) -> None:
            monkeypatch.setenv(HALFWAY_VARIABLE, str(halfway))

            def kill() -> None:
                eventually(halfway.exists)
                monkeypatch.delenv(HALFWAY_VARIABLE)
                os.kill(pid, signal.SIGKILL)
                halfway.unlink()

            threading.Thread(target=kill, daemon=True).start()

        push_while_one_dies(collector, policy.fill(2), kill_halfway)
