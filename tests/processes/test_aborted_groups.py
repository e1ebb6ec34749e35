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
from helpers import nccl_stand_in
from helpers.nccl_stand_in import HALFWAY_VARIABLE, NAME
from helpers.publishing import Disturbed, Telling, pids, telling_workers, told
from helpers.waiting import eventually

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules
nccl_stand_in.register()


def push_while_one_dies(
    collector: dc.RPCDataCollector,
    updater: Disturbed,
    policy: Telling,
    kill: Callable[[int], Any],
) -> None:
    """Push; ``kill``, which gets worker 1's process id, is called before the payload is sent."""
    while 1 not in (present := pids(collector.next())):
        pass  # its replacement has yet to come; the others collect its share
    victim = present[1]
    updater.disturb = lambda: kill(victim)
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
    assert victim not in pids(batch).values()


def test_one_that_dies_while_members_are_connected_and_one_in_mid_push(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy, updater = Telling(), Disturbed(NAME)
    halfway = tmp_path / "halfway"
    with telling_workers(
        policy, 3, init_fn=nccl_stand_in.register, weight_updater=updater
    ) as collector:
        push_while_one_dies(
            collector, updater, policy.fill(1), lambda pid: os.kill(pid, signal.SIGKILL)
        )

        def kill_halfway(pid: int) -> None:
            monkeypatch.setenv(HALFWAY_VARIABLE, str(halfway))

            def kill() -> None:
                eventually(halfway.exists)
                monkeypatch.delenv(HALFWAY_VARIABLE)
                os.kill(pid, signal.SIGKILL)
                halfway.unlink()

            threading.Thread(target=kill, daemon=True).start()

        push_while_one_dies(collector, updater, policy.fill(2), kill_halfway)
