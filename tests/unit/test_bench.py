"""``distcollect bench``: its bare loop and arguments; and the tables of tests/benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from benchmarks.command import paired
from benchmarks.items import ITEMS
from benchmarks.runner import Outcome
from benchmarks.windows import NotEnough, frames_per_s
from gymnasium import spaces
from tensordict import TensorDictBase

from distcollect.commands.bench import BareLoop, Measured, table


class Counted(gym.Env[Any, Any]):
    """Checks that it gets the action that belongs to its last observation."""

    observation_space = spaces.Dict(at=spaces.Box(-9, 9, (2,)), turn=spaces.Discrete(99))
    action_space = spaces.Tuple((spaces.Discrete(99), spaces.Box(-9, 9, (2,))))

    def __init__(self) -> None:
        self.turn = 0
        self.steps = 0

    def _observed(self) -> dict[str, Any]:
        return {"at": np.full(2, self.turn / 2, np.float32), "turn": np.int64(self.turn)}

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action[0] == self.turn
        assert (action[1] == self.turn / 2).all()
        self.turn += 1
        self.steps += 1
        return self._observed(), 1.0, self.turn == 5, False, {}


def by_entry(turn: torch.Tensor, at: torch.Tensor) -> Any:
    return (turn, at), {"note": turn * 2}


def by_tensordict(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", {"0": td["turn"], "1": td["at"]})


def test_a_collector_without_workers_is_not_bound_by_a_network() -> None:
    rates = {"envs": 1, "steps": 8, "bare": 2.0, "collector": 1.0, "ratios": [0.5]}
    sizes = [Measured(workers, **rates, bound="network", bottleneck="") for workers in (0, 2)]
    _, in_process, apart, *_ = table(sizes).splitlines()
    assert in_process.endswith(" frames")
    assert apart.endswith(" network")


@pytest.mark.parametrize("policy", [by_entry, by_tensordict])
def test_the_bare_loop_does_what_a_collector_does(policy: Any) -> None:
    loop = BareLoop(Counted, lambda: policy, 3, 7)
    assert loop.num_steps == 7
    assert loop.window(0.01) > 0
    loop.close()


def test_the_bare_loop_takes_random_actions_and_chooses_the_length_of_rollouts() -> None:
    loop = BareLoop(lambda: gym.make("CartPole-v1"), None, 2)
    assert 8 <= loop.num_steps <= 512
    loop.close()


# What follows is about tests/benchmarks.


def test_ratios_are_paired_within_a_repeat() -> None:
    def outcome(*rates: float | None) -> Outcome:
        return Outcome([None if rate is None else {"frames_per_s": rate} for rate in rates])

    # In the second repeat the machine is half as fast; the ratio stays.
    assert paired(outcome(80.0, 40.0, None), outcome(100.0, 50.0, 100.0)) == [0.8, 0.8]


def test_a_window_counts_whole_batches_of_each_source_after_the_warm_up() -> None:
    # Source 0 gives 10 frames each 2 s, source 1 gives 30 frames each 3 s.
    arrivals = sorted([(t, 0, 10) for t in range(2, 99, 2)] + [(t, 1, 30) for t in range(3, 99, 3)])
    now = 0.0

    def batches():
        nonlocal now
        for now, source, frames in arrivals:  # noqa: B007 - the clock reads it
            yield source, frames

    assert frames_per_s(batches(), 20, clock=lambda: now) == pytest.approx(10 / 2 + 30 / 3)
    with pytest.raises(NotEnough):
        frames_per_s(iter([(0, 1)] * 5), 1.0)


def test_every_part_names_a_function() -> None:
    root = Path(__file__).parents[1] / "benchmarks"
    for item in ITEMS.values():
        for part in item.parts.values():
            module, _, name = part.function.partition(":")
            assert f"\ndef {name}(" in (root / f"{module}.py").read_text()
            assert part.baseline is None or part.baseline in item.parts
