"""Judge of inference servers: frames are as they must be, whatever becomes of server and workers.

From docs/inference.md: batches are as without a server; one that dies is replaced, and no frame is
lost. The server and its workers are threads.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.judge_settings import drawn
from helpers.judge_user import MAY_WARN, RECORDS, Operations
from hypothesis import strategies as st
from hypothesis.stateful import rule

import distcollect as dc

# The connections of a worker end with its process, which here is everybody's.
pytestmark = [MAY_WARN, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]


class ServedOperations(Operations):
    """All that a user can do, where one server computes the actions of all workers."""

    # As many threads as there are, since the threads of this process are everybody's.
    more: ClassVar = {"inference": dc.Inference("host", num_threads=torch.get_num_threads())}
    refused: ClassVar = {"in process": "sync", "in turn": "async", **dict.fromkeys(RECORDS)}

    def open(self, mode: str) -> None:
        super().open(mode)
        self.account.num_servers += 1

    def named(self, chosen: set[int]) -> list[int] | None:
        """Weights go to all workers of a server or to none."""
        served = {*self.present} - self.reserved
        return sorted(chosen | served if chosen & served else chosen) or None

    def holders(self, acknowledged: dict[int, int]) -> set[int]:
        found = {*acknowledged}
        return found | ({*range(5)} - self.reserved if found - self.reserved else set())

    @property
    def may_mix(self) -> bool:
        return self.is_sending

    def check_given(self, worker_id: int, version: int) -> None:
        if worker_id in self.reserved:
            super().check_given(worker_id, version)
        else:
            sent = {
                each for w, given in self.sent.items() if w not in self.reserved for each in given
            }
            assert version in {self.shown, *sent}, f"the server has version {version}, of others"

    @rule(rounds=st.integers(1, 3), wait=st.booleans())
    def train_on(self, rounds: int, wait: bool) -> None:
        for _ in range(rounds):
            self.publish("module", set(), True, wait)
            self.take()

    @rule(batches=st.integers(0, 2), publishes=st.booleans())
    def kill_server(self, batches: int, publishes: bool) -> None:
        """The server dies while batches are taken; another process replaces it."""
        if publishes:
            self.publish("state dict", set(), True, True)
        self.account.num_servers += 1
        self.workers.kill_server()
        self.take_batches(batches)

    def close(self) -> None:
        collector = self.collector
        super().close()
        assert self.churned or "worker_lost" not in collector.ledger.total.lost


TestServedOperations = ServedOperations.TestCase
TestServedOperations.settings = drawn()
