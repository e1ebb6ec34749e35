"""Judge of schedules of exploration noise: what they are told of frames and versions is true.

Each frame shows whether its action was random. So it shows one bit of the number of frames that had
been asked for before its rollout, or of its version. From docs/policies.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.churning_workers import churning_collector
from helpers.judge_operations import Maker, Telling, World
from helpers.judge_settings import drawn
from helpers.judge_user import TIMEOUT_S
from helpers.loopback_pool import workers_of
from hypothesis import given
from hypothesis import strategies as st

import distcollect as dc

MODES: dict[str, dict[str, Any]] = {
    "in process": {},
    "sync": {"sync": True},
    "served": {"sync": True, "inference": dc.Inference("host", num_threads=1)},
    "in turn": {"sync": False, "reproducible": True},
}
CALLS = ["next", "next", "publish", "evaluate", "seed", "resume", "kill"]
CASES = st.fixed_dictionaries(
    {
        "num_workers": st.integers(1, 3),
        "num_envs": st.integers(1, 3),
        "num_steps": st.integers(1, 5),
        "resets": st.booleans(),
    }
)
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@dataclass(frozen=True)
class Bit:
    """An epsilon of 0 or 1, by a bit of the number of batches or of the version."""

    number: int
    frames_per_batch: int
    of_version: bool

    def __call__(self, policy_version: int, frames: int) -> float:
        count = policy_version if self.of_version else frames // self.frames_per_batch
        return float(count >> self.number & 1)


class Run:
    """A run of one collector after the other, and what may be done with it."""

    def __init__(self, mode: str, case: dict[str, Any], number: int, *, of_version: bool) -> None:
        self.is_local, self.in_turn = mode == "in process", mode == "in turn"
        rows = case["num_envs"] * (1 if self.in_turn else case["num_workers"])
        self.bit = Bit(number, rows * case["num_steps"], of_version)
        self.options = {
            **MODES[mode],
            "frames_per_batch": self.bit.frames_per_batch,
            "envs_per_worker": rows if self.is_local else case["num_envs"],
            "reset_at_each_iter": case["resets"],
        }
        if not self.is_local:
            self.options["num_workers"] = case["num_workers"]
        self.code = 0.0
        self.open()

    def open(self) -> None:
        make = dc.SyncDataCollector if self.is_local else churning_collector
        noisy = dc.EpsilonGreedy(self.new_policy(), self.bit)
        self.collector = make(Maker(World().number), noisy, **self.options)

    def new_policy(self) -> Telling:
        self.code += 1
        return Telling(self.code)

    def next(self) -> None:
        frames = self.collector.frames
        batch = self.collector.next(TIMEOUT_S)
        is_random = batch["action"][..., 0] != batch["told"][..., 0]
        versions = batch["collector", "policy_version"]
        wanted = versions.clone().apply_(lambda version: bool(self.bit(version, frames)))
        assert torch.equal(is_random, wanted.bool()), (frames, versions, is_random)

    def publish(self) -> None:
        self.collector.update_policy_weights_(self.new_policy())

    def evaluate(self) -> None:
        done = self.collector.evaluate(2, timeout_s=TIMEOUT_S)
        assert torch.equal(done.returns, done.lengths * self.code)

    def seed(self) -> None:
        if not self.in_turn:  # else what was collected ahead is given up
            self.collector.set_seed(3)

    def resume(self) -> None:
        state = self.collector.state_dict()
        self.collector.shutdown()
        self.open()
        self.collector.load_state_dict(state)

    def kill(self) -> None:
        if not self.is_local and not self.in_turn:
            workers_of(self.collector).kill(0)


@pytest.mark.parametrize("mode", MODES)
@drawn()
@given(
    case=CASES,
    number=st.integers(0, 2),
    of_version=st.booleans(),
    calls=st.lists(st.sampled_from(CALLS), min_size=3, max_size=14),
)
def test_a_schedule_is_told_the_truth(
    mode: str, case: dict[str, Any], number: int, of_version: bool, calls: list[str]
) -> None:
    run = Run(mode, case, number, of_version=of_version)
    for call in [*calls, "next"]:
        getattr(run, call)()
    run.collector.shutdown()
