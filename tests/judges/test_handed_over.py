"""Judge of rollouts that are handed over: each is taken whole, once, or is listed as lost.

The taker is the collector itself, for which they are a stream of their own, as another trainer's
are. From docs/launching.md and ``help(dc.RPCDataCollector.hand_over)``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from helpers.judge_settings import drawn
from helpers.judge_user import CASES, MAY_WARN, RECORDS, TIMEOUT_S, WORKERS, Operations
from helpers.waiting import eventually
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import distcollect as dc

pytestmark = MAY_WARN
BETWEEN = ["nothing", "nothing", "next", "publish", "seed", "evaluate", "kill", "leave"]


class HandingOver(Operations):
    """All that a user can do with an asynchronous collector, and rollouts that it hands over."""

    refused: ClassVar = {
        **dict.fromkeys(["in process", "sync", "sync, preempted", "in turn"], "async"),
        **dict.fromkeys([*RECORDS, "whole"]),
    }

    @initialize(
        case=CASES,
        mode=st.sampled_from(["async", "async", "paced", "dropped", "masked"]),
        is_seeded=st.booleans(),
        fills=st.sampled_from([None, "next"]),
    )
    def make(self, case: dict[str, Any], mode: str, is_seeded: bool, fills: str | None) -> None:
        super().make({**case, "fills": fills}, mode, is_seeded)

    @rule(
        count=st.integers(1, 2),
        between=st.sampled_from(BETWEEN),
        number=WORKERS,
        takes=st.sampled_from([True, True, False]),
    )
    def hand_over(self, count: int, between: str, number: int, takes: bool) -> None:
        keep_s = 1e6 if takes else 0.01
        references = [self.collector.hand_over(TIMEOUT_S, keep_s=keep_s) for _ in range(count)]
        if between == "next" and count == 1:  # else a worker may have no memory left
            self.take()
        elif between == "publish":
            self.publish("module", set(), True, True)
        elif between == "seed":
            self.seed(number)
        elif between == "evaluate":
            self.evaluate(1, None)
        elif between in ("kill", "leave"):
            getattr(self, between)(number, 0)
        for reference in references:
            if takes:
                self.take_over(reference, may_be_gone=between in ("kill", "leave"))
            elif reference.tensors is not None:  # it counts as delivered
                self.account.received[reference.worker_id] += reference.num_frames
        if not takes:
            kept = sum(each.num_frames for each in references if each.tensors is None)
            lost = lambda: self.collector.ledger.total.lost  # noqa: E731
            causes = ("not_taken", "worker_lost", "left")
            eventually(lambda: sum(lost().get(each, 0) for each in causes) >= kept)

    @rule(owns=st.lists(st.booleans(), min_size=2, max_size=6))
    def alternate(self, owns: list[bool]) -> None:
        """Some rollouts are its own, others are handed over."""
        for is_own in owns:
            if is_own:
                self.take()
            else:
                self.hand_over(1, "nothing", 0, True)

    def take_over(self, reference: Any, *, may_be_gone: bool) -> None:
        self.account.stream = "taken"
        try:
            batch = self.collector.take_over(reference, TIMEOUT_S)
        except dc.RolloutGone:
            assert may_be_gone
            return
        finally:
            self.account.stream = ""
        if batch is not None:
            self.account.stream = "taken"
            self.receive(batch)
            self.account.stream = ""
        with pytest.raises(dc.RolloutGone, match=r"taken already|has ended"):
            self.collector.take_over(reference, TIMEOUT_S)


TestHandingOver = HandingOver.TestCase
TestHandingOver.settings = drawn()
