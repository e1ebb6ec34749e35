"""Several collectors with workers are open in one process, and none concerns the others."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.envs import PidCartPole as Env
from helpers.marked import Marked
from helpers.paths import SCRIPTS
from helpers.waiting import eventually
from torch import nn

import distcollect as dc

WAIT_S = 60


class Policy(nn.Module):
    """Always takes the action that is its weight."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.tensor(float(action)))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.detach().round().long().expand(len(observation))


def training(policy: Policy) -> dc.MultiSyncDataCollector:
    faults = dc.Faults(restart_pause_s=0.1)
    return dc.MultiSyncDataCollector([Env] * 2, policy, frames_per_batch=64, faults=faults)


def evaluating(policy: Policy) -> dc.MultiaSyncDataCollector:
    return dc.MultiaSyncDataCollector([Env], policy, frames_per_batch=16)


def pids(collector: dc.RPCDataCollector) -> list[int]:
    return [pid for [pid] in collector.call("pid").values()]


def ids_in(batch: Any) -> set[int]:
    return set(batch["collector", "traj_ids"].flatten().tolist())


def test_two_in_turn_and_a_killed_worker_of_one(
    marked: Marked, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Policy(0), Policy(1)
    with training(weights[0]) as first, evaluating(weights[1]) as second:
        ids: tuple[set[int], set[int]] = set(), set()

        def go_on(num_batches: int = 3) -> None:
            for _ in range(num_batches):
                for collector, seen in zip((first, second), ids, strict=True):
                    seen.update(ids_in(collector.next()))
            assert not ids[0] & ids[1]

        go_on()
        before = pids(second)
        weights[1].action.data.fill_(0)
        second.update_policy_weights_(weights[1])
        assert (first.policy_version, second.policy_version) == (0, 1)
        eventually(lambda: int(second.next()["action"].sum()) == 0, WAIT_S)
        killed, other = pids(first)
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(set(pids(first)) - {killed}) == 2, WAIT_S)
        go_on()
        assert other in pids(first)
        assert pids(second) == before
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: pids(second) != before, WAIT_S)
        go_on()
        assert first.stats().workers[0].num_restarts == 1
        assert second.stats().workers[0].num_restarts == 1
        assert not second.ledger.total.lost.keys() - {"worker_lost"}
    lost = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
    assert [text.split(" is lost")[0] for text in lost] == ["worker 0", "worker 0 of collector 2"]
    assert marked.gone(), marked.left()


def test_they_open_and_close_in_any_order(marked: Marked) -> None:
    policy = Policy(0)
    first, second = training(policy), evaluating(policy)
    first.next()
    first.shutdown()
    with pytest.raises(dc.CollectorStateError):
        first.next()
    second.next()
    third = training(policy)
    second.next()
    third.next()
    second.shutdown()
    third.next()
    forgotten = evaluating(policy)
    forgotten.next()
    its_process = pids(forgotten)
    gc.disable()
    del forgotten
    eventually(lambda: not set(its_process) & set(marked.pids()), WAIT_S)
    gc.enable()
    third.next()
    third.update_policy_weights_(policy)
    third.shutdown()
    assert marked.gone(), marked.left()


@pytest.mark.parametrize(("end", "code"), [("exit", 0), ("SIGINT", -signal.SIGINT)])
def test_all_of_them_end_with_the_program(marked: Marked, end: str, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPTS / "leave_two_open.py", end],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        marked.note()
        if end == "SIGINT":
            program.send_signal(signal.SIGINT)
        assert program.wait(WAIT_S) == code
    assert marked.gone(), marked.left()
