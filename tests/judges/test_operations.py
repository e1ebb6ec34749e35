"""Judge of running collectors: whatever is done with them, in whatever order, each promise holds.

Frames are compared with what happened in the envs; their weights with what was published for the
worker; what the policy saw with statistics of all frames before. The collectors are those of this
process, and those whose workers are threads: random sequences of operations take little time.
From docs/guarantees.md, semantics.md, weights.md, normalising.md, policies.md and training.md.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.judge_operations import Maker, Telling, World
from helpers.judge_settings import drawn
from helpers.judge_user import (
    CASES,
    MAY_WARN,
    MODES,
    NEUTRAL,
    RECORDS,
    TIMEOUT_S,
    Buffer,
    Operations,
    options_of,
)
from helpers.loopback_pool import loopback_collector
from helpers.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import distcollect as dc

pytestmark = MAY_WARN
TestOperations = Operations.TestCase
TestOperations.settings = drawn()


STREAMS = ["in process", "sync", "in turn"]
# Before a seed, workers may have collected ahead, and called the policy more often or less.
UNTOLD: dict[str, set[str]] = {"in process": set(), "sync": set(), "in turn": {"told"}}


def collector_of(mode: str, case: dict[str, Any], policy: Any, **more: Any) -> Any:
    """A new collector with envs of a new world."""
    if case["noisy"]:
        policy = dc.GaussianNoise(policy, std=dc.LinearSchedule(1.0, 0.1, frames=40))
    make = dc.SyncDataCollector if MODES[mode] is None else loopback_collector
    more["init_random_frames"] = case["random_frames"]
    return make(Maker(World().number), policy, **options_of(mode, case), **more)


def stream(
    kind: str, case: dict[str, Any], script: list[str], neutral: list[tuple[int, str]] = ()
) -> list[list[Any]]:
    """What a run delivers, batch by batch, with ids in the order in which they came."""
    policy, numbers, names = Telling(), itertools.count(1), {}
    found = []
    collector = collector_of(kind, case, policy)
    collector.set_seed(3)
    for index, step in enumerate(script):
        for at, name in neutral:
            if at == index:
                NEUTRAL[name](collector)
        if step == "next":
            found.append(shown(collector.next(TIMEOUT_S), names))
        elif step.startswith("publish"):
            policy.become(next(numbers))
            collector.update_policy_weights_(policy, wait=step == "publish")
        elif step == "seed":
            collector.set_seed(4)
        else:
            state = collector.state_dict()
            collector.shutdown()
            policy = Telling(next(numbers))
            collector = collector_of(kind, case, policy)
            collector.load_state_dict(state)
    collector.shutdown()
    return found


def shown(batch: TensorDict, names: dict[int, int]) -> dict[str, Any]:
    """The entries of a batch, in rows, without what differs from run to run."""
    batch = batch.reshape(-1, batch.shape[-1])
    entries = {str(key): value.clone() for key, value in batch.items(True, True)}
    for key in ("place", "('next', 'place')"):
        entries[key][..., :2] = 0
    ids = entries["('collector', 'traj_ids')"]
    ids.apply_(lambda each: each if each < 0 else names.setdefault(each, len(names)))
    return entries


def differing(one: list[Any], other: list[Any], without: set[str] = frozenset()) -> list[Any]:
    assert len(one) == len(other)
    return [
        (number, key)
        for number, (left, right) in enumerate(zip(one, other, strict=True))
        for key in left.keys() - without
        if not torch.equal(left[key], right[key])
    ]


SCRIPTS = st.lists(
    st.sampled_from(["next", "next", "publish", "publish soon", "seed", "resume"]),
    min_size=2,
    max_size=9,
)
DISTURBANCES = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from(sorted(NEUTRAL))), min_size=1, max_size=6
)


@pytest.mark.parametrize("kind", STREAMS)
@given(case=CASES, script=SCRIPTS, neutral=DISTURBANCES)
def test_who_only_looks_changes_nothing(
    kind: str, case: dict[str, Any], script: list[str], neutral: list[tuple[int, str]]
) -> None:
    script = ["next", *script, "next", "next"]
    streams = stream(kind, case, script), stream(kind, case, script, neutral)
    assert differing(*streams, UNTOLD[kind]) == []


@given(case=CASES, script=SCRIPTS)
def test_workers_give_what_this_process_gives(case: dict[str, Any], script: list[str]) -> None:
    script = ["next", *script, "next"]
    if case["form"] in RECORDS:  # in this process, statistics are in use from the next batch on
        script = [each for step in script for each in (step, "publish")]
    here, there = (stream(kind, case, script) for kind in ("in process", "sync"))
    for batch in (*here, *there):
        batch["told"][..., 3] = 0  # each worker counts its own calls
    assert differing(here, there, {"('collector', 'worker_id')"}) == []


@pytest.mark.parametrize("kind", STREAMS)
@given(case=CASES, num_batches=st.integers(1, 6), neutral=DISTURBANCES)
def test_the_background_gives_the_same(
    kind: str, case: dict[str, Any], num_batches: int, neutral: list[tuple[int, str]]
) -> None:
    # In this process, statistics are used from the next batch on, but in the background not.
    case = {**case, "form": "raw" if case["form"] in RECORDS and kind != "in process" else None}
    names: dict[int, int] = {}
    added: list[Any] = []
    num_steps = case["num_steps"]
    buffer = Buffer(lambda data: added.append(shown(data.reshape(-1, num_steps), names)))
    frames = case["num_envs"] * num_steps * (case["num_workers"] if kind != "in turn" else 1)
    with collector_of(
        kind, case, Telling(), replay_buffer=buffer, total_frames=num_batches * frames
    ) as collector:
        collector.set_seed(3)
        collector.start()
        for _, name in neutral:
            with collector.pause():
                before = buffer.num_added
                NEUTRAL[name](collector)
                assert buffer.num_added == before
        eventually(lambda: not collector.is_running)
    assert differing(stream(kind, case, ["next"] * num_batches), added, UNTOLD[kind]) == []
