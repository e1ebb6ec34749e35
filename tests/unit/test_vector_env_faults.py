"""Vector envs that raise are replaced."""

from __future__ import annotations

import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.counting_envs import (
    CountingVectorEnv,
)
from helpers.fragile_envs import (
    Fragile,
    Maker,
    N,
    T,
    VectorMaker,
    check_a_vector_env_that_raises,
    check_policy,
    check_row,
    check_rows_of_a_vector_env_with_episodes_of_their_own,
    collect,
    collect_checked,
    engine_of,
    is_accounted_for,
    quiet,
    steps_of,
)
from helpers.policies import SummingPolicy

import distcollect as dc

VECTOR_KINDS = ["sync-next", "sync-same", "native-next", "native-same", "native-disabled"]


@quiet
@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("at", [1, 3, T, T + 1, T + 3])
def test_a_vector_env_that_raises(kind: str, at: int) -> None:
    check_a_vector_env_that_raises(kind, at)


@quiet
@pytest.mark.parametrize("kind", VECTOR_KINDS)
@pytest.mark.parametrize("at", [2, 3, 4])
def test_rows_of_a_vector_env_with_episodes_of_their_own(kind: str, at: int) -> None:
    check_rows_of_a_vector_env_with_episodes_of_their_own(kind, at)


@pytest.mark.parametrize("kind", ["sync-next", "native-disabled"])
def test_a_reset_of_some_rows_that_raises(kind: str) -> None:
    """The other rows' last transition was real; the fault ends their trajectories there."""
    lengths = (3, 5, 7)  # of rows 0, 1 and 2 in their first episodes
    maker = VectorMaker(kind, Maker({0: [("reset", 2)]}, lengths))
    engine = engine_of(maker, SummingPolicy())
    batch = collect_checked(engine, 2, lengths)
    assert batch["collector", "faulted"].nonzero().tolist() == [[1, 2], [2, 2]]
    assert batch["next", "done"][:, 2].all()
    assert [steps_of(row)[3] for row in batch] == [(10, 0, 0), (11, 0, 0), (12, 0, 0)]


@quiet
@pytest.mark.parametrize("kind", ["sync-next", "native-next"])
def test_a_vector_env_that_goes_on_raising_is_given_up(kind: str) -> None:
    maker = VectorMaker(kind, Maker({1: [("step", T + 3), *[("step", 1)] * 9]}))
    engine = engine_of(maker, faults=1)
    delivered = collect(engine, 1).numel()
    with pytest.raises(dc.EnvError, match=r"vector env .*step\(\) raised .*replaced 1 time "):
        collect(engine, 1)
    assert engine.counter.lost == {"env_failed": 2 * N}
    assert is_accounted_for(engine, delivered)
    engine.close()


UNEVEN = [(1,), (50,), (3,)]


class Uneven:
    """Makes native vector envs whose rows drift apart; the first one raises at step ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.made = 0

    def __call__(self) -> CountingVectorEnv:
        fails = ("step", self.at) if not self.made else None
        envs = [
            Fragile(row + 10 * self.made, fails if row == 1 else None, lengths)
            for row, lengths in enumerate(UNEVEN)
        ]
        self.made += 1
        return CountingVectorEnv(envs, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("at", range(1, 40, 6))
def test_rows_that_drift_apart(at: int, fresh: bool) -> None:
    engine = engine_of(Uneven(at), SummingPolicy())
    batch = collect(engine, 10, fresh=fresh)
    check_policy(batch)
    for row, each in enumerate(batch):
        ids = each["collector", "traj_ids"]
        sizes = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
        for part in each.split(sizes):
            check_row(part, UNEVEN[row])
        places = steps_of(each)
        assert sorted(places) == places, "a frame out of place"
        assert len(set(places)) == len(places), "a frame twice"
    assert is_accounted_for(engine, batch.numel())
    assert engine.counter.env_faults == 1
