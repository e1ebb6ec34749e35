"""Judge of ``Prioritized``: it has what was delivered, and samples it by the newest priorities.

Whatever is done with the collector that fills it, also in the background, and if it is saved and
loaded by another one. From docs/training.md and ``help(dc.Prioritized)``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.judge_settings import drawn
from helpers.judge_user import CASES, MAY_WARN, MODES, Buffer, Operations
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tensordict import TensorDict

import distcollect as dc

pytestmark = MAY_WARN
CAPACITY, ALPHA, BETA, EPSILON = 40, 0.7, 0.5, 1e-6
NUM_SAMPLES = 3000


class Ring(Buffer):
    """Keeps the newest frames.

    Attributes:
        extended: by index the call of ``extend`` that wrote the frame, and its ``place``.
        new: indices that were written to since the priorities were looked at.
    """

    def __init__(self, take: Any) -> None:
        super().__init__(take)
        self.frames: TensorDict | None = None
        self.num_frames = self.num_calls = 0
        self.extended: dict[int, tuple[int, list[int]]] = {}
        self.new: list[int] = []

    def extend(self, data: TensorDict) -> torch.Tensor:
        index = (self.num_frames + torch.arange(len(data))) % CAPACITY
        self.num_frames += len(data)
        self.num_calls += 1
        if self.frames is None:
            self.frames = data[:1].expand(CAPACITY).clone()
        for each, frame in zip(index.tolist(), data, strict=True):
            self.frames[each] = frame
            self.extended[each] = self.num_calls, frame["place"].tolist()
        self.new += index.tolist()
        super().extend(data)
        return index

    def __getitem__(self, index: Any) -> TensorDict:
        assert self.frames is not None
        return self.frames[index].clone()

    def __len__(self) -> int:
        return min(self.num_frames, CAPACITY)

    def state_dict(self) -> Any:
        return {"frames": self.frames, "num_frames": self.num_frames}

    def empty(self) -> None:
        self.num_frames = 0
        self.extended.clear()
        self.new.clear()

    def load_state_dict(self, state: Any) -> None:
        self.frames, self.num_frames = state["frames"], state["num_frames"]


class PrioritizedOperations(Operations):
    """All that a user can do, where frames go to a buffer that is sampled by priority."""

    @initialize(
        case=CASES,
        mode=st.sampled_from(sorted(MODES)),
        is_seeded=st.booleans(),
        fills=st.sampled_from(["next", "start"]),
    )
    def make(self, case: dict[str, Any], mode: str, is_seeded: bool, fills: str) -> None:
        self.priorities: dict[int, float] = {}
        self.highest = 1.0
        self.samples: list[TensorDict] = []
        self.buffer = None
        super().make({**case, "fills": fills}, mode, is_seeded)

    def new_buffer(self) -> Any:
        before, ring = self.buffer, Ring(self.receive)
        buffer = dc.Prioritized(ring, alpha=ALPHA, beta=BETA)
        if before is not None:
            buffer.load_state_dict(copy.deepcopy(before.state_dict()))
            ring.num_calls, ring.extended, ring.new = before.num_calls, before.extended, before.new
        return buffer

    def look_at_new(self) -> None:
        """New frames have the highest priority that there was."""
        self.priorities.update(dict.fromkeys(self.buffer.new, self.highest))
        self.buffer.new.clear()

    @rule(seed=st.integers(0, 99))
    def sample(self, seed: int) -> None:
        with self.quiet:
            self.look_at_new()
            if not self.priorities:
                with pytest.raises(dc.CollectorStateError, match="no frames"):
                    self.buffer.sample(1)
                return
            generator = torch.get_rng_state()
            torch.manual_seed(seed)
            samples = self.buffer.sample(NUM_SAMPLES)
            torch.set_rng_state(generator)
            assert sorted(self.priorities) == [*range(len(self.buffer))]
            values = [self.priorities[each] for each in sorted(self.priorities)]
            weights = (torch.tensor(values, dtype=torch.float64) + EPSILON) ** ALPHA
            index = samples["index"]
            for each in index.unique().tolist():
                made = samples["generation"][index == each].unique().tolist()
                place = samples["place"][index == each].unique(dim=0).tolist()
                assert ([self.buffer.extended[each]]) == [*zip(made, place, strict=True)]
            expected = (weights[index] / weights.min()) ** -BETA
            assert torch.allclose(samples["priority_weight"].double(), expected, rtol=1e-4)
            wanted = NUM_SAMPLES * weights / weights.sum()
            counted = torch.bincount(index, minlength=len(weights))
            scale = 6 * wanted.sqrt() + 6
            assert ((counted - wanted).abs() < scale).all(), (counted, wanted)
        self.samples.append(samples)

    @precondition(lambda self: self.samples)
    @rule(number=st.integers(0, 99), factor=st.sampled_from([0.0, 0.3, 1.0, 5.0]))
    def set_priorities(self, number: int, factor: float) -> None:
        """Of an earlier sample: some of its frames may be gone by now."""
        samples = self.samples[number % len(self.samples)]
        index = samples["index"]
        samples["td_error"] = (-1) ** index * factor * (index % 3).float()
        with self.quiet:
            self.look_at_new()
            known = zip(index.tolist(), samples["generation"].tolist(), strict=True)
            is_there = [self.buffer.extended.get(each, (0,))[0] == made for each, made in known]
            assert self.buffer.update_tensordict_priority(samples) == sum(is_there)
        for each in {*index[torch.tensor(is_there)].tolist()}:
            self.priorities[each] = factor * (each % 3)
            self.highest = max(self.highest, self.priorities[each])

    @rule(seed=st.integers(0, 99), factor=st.sampled_from([0.3, 5.0]))
    def train_on(self, seed: int, factor: float) -> None:
        self.take()
        self.sample(seed)
        self.set_priorities(len(self.samples) - 1, factor)
        self.take()
        self.sample(seed + 1)

    @rule(mode=st.sampled_from(sorted(MODES)), seed=st.integers(0, 99))
    def resume(self, mode: str, seed: int) -> None:
        self.train_on(seed, 5.0)
        self.save_and_load(mode, 1)
        self.take()
        self.sample(seed)

    @rule()
    def empty(self) -> None:
        with self.quiet:
            self.buffer.empty()
            self.priorities.clear()


TestPrioritizedOperations = PrioritizedOperations.TestCase
TestPrioritizedOperations.settings = drawn()
