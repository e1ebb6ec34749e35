"""The data contract, kept by every collector class with every kind of env.

To put another class under it: one more line in DELIVERIES.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.counting import (
    ACTIONS,
    ENV_KINDS,
    FILLER_KINDS,
    OBSERVATIONS,
    UNCUTTABLE_KINDS,
    CountingEnv,
    CountingMaker,
    CountingVectorEnv,
    Frame,
    check_frames,
)
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.distributions import Categorical

import distcollect as dc
from distcollect.rollout.spaces import flatten

N, T = 3, 7
Spec = dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class BatchFormat:
    """A way to get batches.

    Attributes:
        collector: the class, or a function that makes one, and its settings.
        num_workers: processes or threads that step envs.
        on_policy: a batch has the rows of all workers in order, and none of it is collected ahead.
        shape: of a batch, from workers, envs per worker and steps.
    """

    collector: Callable[..., Any]
    num_workers: int
    on_policy: bool
    shape: Callable[[int, int, int], tuple[int, ...]]

    def start(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        envs: int = N,
        steps: int = T,
        **kwargs: Any,
    ) -> Any:
        rows = envs * (self.num_workers if self.on_policy else 1)
        sizes = {"frames_per_batch": rows * steps, "envs_per_worker": envs}
        return self.collector(create_env_fn, policy, **{**sizes, **kwargs})


def _all_rows(num_workers: int, num_envs: int, num_steps: int) -> tuple[int, ...]:
    return (num_workers * num_envs, num_steps)


def _own_rows(num_workers: int, num_envs: int, num_steps: int) -> tuple[int, ...]:
    return (num_envs, num_steps)


def _no_row_if_single(num_workers: int, num_envs: int, num_steps: int) -> tuple[int, ...]:
    return (num_steps,) if num_envs == 1 else (num_envs, num_steps)


def _rpc(collector: Callable[..., Any], *, sync: bool) -> BatchFormat:
    start = partial(collector, num_workers=2, sync=sync)
    return BatchFormat(start, 2, sync, _all_rows if sync else _own_rows)


DELIVERIES = {
    "in-process": BatchFormat(dc.SyncDataCollector, 1, True, _no_row_if_single),
    "loopback-sync": _rpc(loopback_collector, sync=True),
    "loopback-async": _rpc(loopback_collector, sync=False),
    "rpc-sync": _rpc(dc.RPCDataCollector, sync=True),
    "rpc-async": _rpc(dc.RPCDataCollector, sync=False),
    "rpc-multi": BatchFormat(
        partial(dc.MultiSyncDataCollector, num_workers=2, cat_results=0), 2, True, _all_rows
    ),
    "rpc-multia": BatchFormat(
        partial(dc.MultiaSyncDataCollector, num_workers=2), 2, False, _own_rows
    ),
    "rpc-one": BatchFormat(dc.aSyncDataCollector, 1, False, _own_rows),
}
# Those that start no processes: cheap enough for the full cross product.
LIGHT = [name for name in DELIVERIES if not name.startswith("rpc")]
HEAVY = [name for name in DELIVERIES if name.startswith("rpc")]

_f32, _f64, _i64 = torch.float32, torch.float64, torch.int64
_i8, _u8, _bool = torch.int8, torch.uint8, torch.bool
OBSERVATION_SPECS: dict[str, Spec] = {
    "box32": {("observation",): ((4,), _f32)},
    "box64": {("observation",): ((4,), _f64)},
    "image": {("observation",): ((4, 3, 2), _u8)},
    "discrete": {("observation",): ((), _i64)},
    "multidiscrete": {("observation",): ((4,), _i64)},
    "multibinary": {("observation",): ((24,), _i8)},
    "dict": {
        ("image",): ((2, 2), _u8),
        ("inner", "echo"): ((), _i64),
        ("inner", "pair", "0"): ((), _f64),
        ("inner", "pair", "1"): ((2,), _i8),
        ("place",): ((2,), _f32),
    },
    "tuple": {("observation", "0"): ((3,), _f32), ("observation", "1"): ((), _i64)},
}
ACTION_SPECS: dict[str, Spec] = {
    "discrete": {("action",): ((), _i64)},
    "discrete_start": {("action",): ((), _i64)},
    "box": {("action",): ((2,), _f32)},
    "box_scalar": {("action",): ((), _f64)},
    "multidiscrete": {("action",): ((2,), _i64)},
    "multibinary": {("action",): ((3,), _i8)},
    "dict": {
        ("action", "go"): ((), _i64),
        ("action", "how", "0"): ((2,), _f32),
        ("action", "how", "1"): ((), _i64),
    },
    "tuple": {("action", "0"): ((), _i64), ("action", "1"): ((2,), _i8)},
}
SPACES = [
    ("box32", "discrete"),
    ("dict", "dict"),
    ("box64", "box_scalar"),
    ("image", "box"),
    ("discrete", "multidiscrete"),
    ("multidiscrete", "discrete_start"),
    ("multibinary", "multibinary"),
    ("tuple", "tuple"),
]
ENDS: Spec = {(name,): ((1,), _bool) for name in ("done", "terminated", "truncated")}
IDS: Spec = {
    ("collector", name): ((), _i64) for name in ("traj_ids", "policy_version", "worker_id")
} | {("collector", "faulted"): ((), _bool)}


class Noter:
    """A policy for any spaces: random actions, and a note of what it has seen."""

    SPEC: ClassVar[Spec] = {("seen",): ((), _f64), ("deep", "twice"): ((2,), _f32)}

    def __init__(self, action: str) -> None:
        self.name = action
        self.space = ACTIONS[action]

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        drawn = [list(flatten(self.space, self.space.sample())) for _ in range(len(td))]
        seen = self.seen(td)
        for index, key in enumerate(ACTION_SPECS[self.name]):
            td[key] = torch.as_tensor(np.stack([row[index] for row in drawn]))
        td["seen"] = seen
        td["deep", "twice"] = torch.stack([seen, seen], -1).float()
        return td

    @staticmethod
    def seen(td: TensorDictBase) -> torch.Tensor:
        """Of the observations in ``td``, which has nothing else but what is skipped here."""
        skipped = {"action", "collector", "deep", "done", "next", "seen", "terminated", "truncated"}
        parts = [value for key, value in sorted(_leaves(td).items()) if key[0] not in skipped]
        sums = [part.double().reshape(*td.shape, -1).sum(-1) for part in parts]
        return sum(index * part for index, part in enumerate(sums, start=1))

    def check(self, batch: TensorDictBase) -> None:
        assert torch.allclose(batch["seen"], self.seen(batch))
        assert torch.equal(batch["deep", "twice"][..., 1], batch["seen"].float())


class Teller(nn.Module):
    """Shows which weights it used: ``told`` is what its only weight says, the version."""

    SPEC: ClassVar[Spec] = {("told",): ((), _f32), ("sum",): ((), _f32)}

    def __init__(self, told: float = 0.0) -> None:
        super().__init__()
        self.told = nn.Parameter(torch.tensor(float(told)))

    def forward(self, observation: torch.Tensor) -> Any:
        total = observation.sum(-1)
        return total.long() % 5, {"told": self.told.expand(len(observation)), "sum": total}

    def check(self, batch: TensorDictBase) -> None:
        assert torch.equal(batch["told"].long(), batch["collector", "policy_version"])
        assert torch.equal(batch["sum"], batch["observation"].sum(-1))
        assert torch.equal(batch["action"], batch["sum"].long() % 5)


def _leaves(td: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    return {
        (key,) if isinstance(key, str) else key: value
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Bit for bit; NaN is like NaN."""
    mine, its = _leaves(one), _leaves(other)
    return mine.keys() == its.keys() and all(
        value.numpy().tobytes() == its[key].numpy().tobytes() for key, value in mine.items()
    )


@dataclass
class Oracle:
    """Knows what the batches of one collector have to be; follows each row over all of them.

    Attributes:
        cut_after: max_frames_per_traj.
        info: specs of the info entries in the batch.
        extras: specs of what the policy writes.
        resets: every batch starts with a reset.
        shown: what the env was given, from what the batch says the policy chose.
    """

    delivery: BatchFormat
    maker: CountingMaker
    steps: int = T
    cut_after: int | None = None
    info: Spec = field(default_factory=dict)
    extras: Spec = field(default_factory=dict)
    resets: bool = False
    shape: tuple[int, ...] | None = None
    shown: Callable[[np.ndarray], np.ndarray] | None = None
    clones: list[TensorDictBase] = field(default_factory=list)
    _last: TensorDictBase | None = None

    def take(self, batch: TensorDictBase) -> None:
        """Check all of a batch that can be told from it alone, then make it unusable."""
        self._check_structure(batch)
        check_yours(batch)
        clone = batch.clone()
        if self._last is not None:
            assert same(self._last, self.clones[-1]), "an earlier batch was changed"
            for value in _leaves(self._last).values():
                value.fill_(1)
            assert same(batch, clone), "shares memory with an earlier batch"
        self.clones.append(clone)
        self._last = batch

    @property
    def worker_ids(self) -> set[int]:
        return {int(i) for b in self.clones for i in b["collector", "worker_id"].unique()}

    def check(self) -> None:
        """Check every value of every row over all batches."""
        runs: list[int] = []
        for (worker_id, row), parts in self._rows().items():
            runs += self._check_row(worker_id * self.maker.num_envs + row, parts)
        assert len(runs) == len(set(runs)), "two trajectories have the same id"

    def _check_structure(self, batch: TensorDictBase) -> None:
        workers, envs = self.delivery.num_workers, self.maker.num_envs
        shape = self.shape or self.delivery.shape(workers, envs, self.steps)
        observed = {**OBSERVATION_SPECS[self.maker.observation], **self.info}
        expected: Spec = {**observed, **ACTION_SPECS[self.maker.action], **self.extras}
        expected |= ENDS | IDS
        following: Spec = {**observed, ("reward",): ((1,), _f32), **ENDS}
        expected |= {("next", *key): spec for key, spec in following.items()}
        given = {key: (tuple(v.shape), v.dtype) for key, v in _leaves(batch).items()}
        assert given == {key: ((*shape, *tail), dtype) for key, (tail, dtype) in expected.items()}
        assert batch.shape == shape
        nodes = [value for value in batch.values(True) if isinstance(value, TensorDictBase)]
        for node in (batch, *nodes):
            assert node.names[-1] == "time"
            assert node.shape == shape
        assert not any(batch[name].any() for name in ("done", "terminated", "truncated"))
        ends = batch["next", "terminated"] | batch["next", "truncated"]
        assert torch.equal(batch["next", "done"], ends)
        assert not batch["collector", "faulted"].any()
        ids = batch["collector", "worker_id"].reshape(-1, self.steps)
        if self.delivery.on_policy:
            wanted = torch.arange(workers).repeat_interleave(envs)
        else:
            wanted = ids[0, 0].expand(envs)
        assert torch.equal(ids, wanted[:, None].expand(-1, self.steps))

    def _rows(self) -> dict[tuple[int, int], list[TensorDictBase]]:
        rows: dict[tuple[int, int], list[TensorDictBase]] = {}
        for batch in self.clones:
            for index, row in enumerate(batch.reshape(-1, self.steps).unbind(0)):
                worker_id = int(row["collector", "worker_id"][0])
                rows.setdefault((worker_id, index % self.maker.num_envs), []).append(row)
        return rows

    def _check_row(self, number: int, parts: list[TensorDictBase]) -> list[int]:
        """Check one row; the ids of its trajectories."""
        # Where frames may be missing: rows of these envs drift apart, and nothing is kept.
        gaps = self.maker.kind in FILLER_KINDS and self.delivery.on_policy
        pieces = parts if gaps or self.resets else [torch.cat(parts)]
        keys = [*OBSERVATION_SPECS[self.maker.observation], *self.info]
        ids: list[int] = []
        place: tuple[int, ...] = (-1, 0)
        before: TensorDictBase | None = None
        for piece in pieces:
            assert check_frames(
                self._frames(piece),
                number=number,
                observation=self.maker.observation,
                action=self.maker.action,
                lengths=self.maker.lengths,
                info_keys=list(self.info),
                cut_after=self.cut_after,
            ) == len(piece)
            first = self._facts(piece[0])
            assert first > place, "a frame twice, or out of place"
            place = self._facts(piece[-1])
            assert not self.resets or first[1] == 0
            new_ids = piece["collector", "traj_ids"].tolist()
            ended = piece["next", "done"].flatten().tolist()
            if before is not None:
                follows = all(torch.equal(before[("next", *k)], piece[0][k]) for k in keys)
                ends = self.resets or not follows
                assert (new_ids[0] != ids[-1]) == ends
            changes = [a != b for a, b in pairwise(new_ids)]
            assert changes == ended[:-1], "traj_ids change where no episode ends, or don't"
            ids += new_ids
            before = piece[-1]
        return [ids[0], *(b for a, b in pairwise(ids) if a != b)]

    def _facts(self, frame: TensorDictBase) -> tuple[int, ...]:
        parts = [frame[key].numpy() for key in OBSERVATION_SPECS[self.maker.observation]]
        facts = OBSERVATIONS[self.maker.observation].decode(parts)
        return tuple(round(float(fact)) for fact in facts[1:3])

    def _frames(self, piece: TensorDictBase) -> Iterable[Frame]:
        keys = [*OBSERVATION_SPECS[self.maker.observation], *self.info]
        root = {key: piece[key].numpy() for key in keys}
        after = {key: piece[("next", *key)].numpy() for key in keys}
        action = {key: piece[key].numpy() for key in ACTION_SPECS[self.maker.action]}
        if self.shown is not None:
            action = {key: self.shown(value) for key, value in action.items()}
        ends = [piece["next", name].flatten().tolist() for name in ("terminated", "truncated")]
        rewards = piece["next", "reward"].flatten().tolist()
        for t in range(len(piece)):
            yield Frame(
                {key: value[t] for key, value in root.items()},
                {key: value[t] for key, value in action.items()},
                rewards[t],
                {key: value[t] for key, value in after.items()},
                ends[0][t],
                ends[1][t],
            )


def check_yours(batch: TensorDictBase) -> None:
    """Nothing stands in the way of whatever the user does to a batch."""
    leaves = _leaves(batch)
    storages = [value.untyped_storage().data_ptr() for value in leaves.values()]
    assert len(set(storages)) == len(storages), "two entries share memory"
    for value in leaves.values():
        assert not value.is_inference()
        assert not value.requires_grad
        # Every element has memory of its own: nothing is expanded.
        assert value.untyped_storage().nbytes() >= value.nbytes
    weight = torch.ones((), requires_grad=True)
    sum((v.double() * weight).sum() for v in leaves.values()).backward()
    assert weight.grad is not None


def run(
    delivery: BatchFormat,
    maker: CountingMaker,
    policy: Any = None,
    *,
    batches: int = 4,
    **kwargs: Any,
) -> Oracle:
    """Collect and check some batches; every worker takes part."""
    known = {"cut_after", "info", "extras", "resets", "shape", "shown", "steps"}
    about = {key: kwargs.pop(key) for key in known & kwargs.keys()}
    oracle = Oracle(delivery, maker, **about)
    settings = {"envs": maker.num_envs, "steps": oracle.steps, **kwargs}
    with delivery.start(maker, policy, **settings) as collector:
        while len(oracle.clones) < batches or len(oracle.worker_ids) < delivery.num_workers:
            oracle.take(collector.next(timeout_s=60))
            assert len(oracle.clones) < 200, "one worker delivers nothing"
    oracle.check()
    return oracle


def check_contract(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    maker = CountingMaker(kind, N, *spaces)
    policy = Noter(maker.action)
    oracle = run(DELIVERIES[delivery], maker, policy, extras=Noter.SPEC)
    for batch in oracle.clones:
        policy.check(batch)
        assert not batch["collector", "policy_version"].any()


@pytest.mark.parametrize("kind", ENV_KINDS)
@pytest.mark.parametrize("spaces", SPACES[:2], ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_env_kind(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


@pytest.mark.parametrize("kind", ["plain", "sync-same", "native-next", "native-disabled"])
@pytest.mark.parametrize("spaces", SPACES[2:], ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_space(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


@pytest.mark.parametrize(
    ("kind", "spaces"),
    [
        ("plain", ("dict", "dict")),
        ("sync-next", ("box64", "box")),
        ("async-same-live", ("image", "tuple")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("delivery", HEAVY)
def test_worker_processes(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


@pytest.mark.parametrize("kind", ["plain", "native-same", "native-next"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("delivery", LIGHT)
def test_shortest_rollouts(delivery: str, kind: str, steps: int) -> None:
    run(DELIVERIES[delivery], CountingMaker(kind, N), steps=steps, batches=15)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-next"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_single_env(delivery: str, kind: str) -> None:
    shape = (2, T) if delivery == "loopback-sync" else (T,) if delivery == "in-process" else (1, T)
    run(DELIVERIES[delivery], CountingMaker(kind, 1), shape=shape)


def test_stack() -> None:
    kwargs = {"shape": (2, N, T), "cat_results": "stack"}
    run(DELIVERIES["loopback-sync"], CountingMaker("plain", N, "dict", "dict"), **kwargs)


class UnevenMaker:
    """A native vector env whose rows drift apart by more than a rollout."""

    LENGTHS = ((1,), (50,), (3,))

    def __call__(self) -> CountingVectorEnv:
        envs = [CountingEnv(i, lengths=lengths) for i, lengths in enumerate(self.LENGTHS)]
        return CountingVectorEnv(envs, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("delivery", LIGHT)
def test_rows_that_drift_apart(delivery: str) -> None:
    """What finds no room is left out, and leaves no wrong frame behind."""
    parts: dict[tuple[int, int], list[TensorDictBase]] = {}
    with DELIVERIES[delivery].start(UnevenMaker()) as collector:
        for _ in range(12):
            for index, row in enumerate(collector.next(timeout_s=60).reshape(-1, T).unbind(0)):
                worker_id = int(row["collector", "worker_id"][0])
                parts.setdefault((worker_id, index % N), []).append(row)
    all_ids: list[int] = []
    for (_, number), rows in parts.items():
        row = torch.cat(rows)
        ids = row["collector", "traj_ids"]
        starts = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
        oracle = Oracle(DELIVERIES[delivery], CountingMaker("native-next", N))
        place: tuple[int, ...] = (-1, 0)
        for start, end in pairwise(starts):
            trajectory = row[start:end]
            lengths = UnevenMaker.LENGTHS[number]
            check_frames(oracle._frames(trajectory), number=number, lengths=lengths)
            assert not trajectory["next", "done"][:-1].any()
            first = oracle._facts(trajectory[0])
            assert first > place, "a frame twice, or out of place"
            place = oracle._facts(trajectory[-1])
            all_ids.append(int(ids[start]))
    assert len(all_ids) == len(set(all_ids))


# Options.


@pytest.mark.parametrize("kind", [kind for kind in ENV_KINDS if kind not in UNCUTTABLE_KINDS])
@pytest.mark.parametrize("longest", [1, 3])
def test_max_frames_per_traj(kind: str, longest: int) -> None:
    kwargs = {"cut_after": longest, "max_frames_per_traj": longest}
    run(DELIVERIES["in-process"], CountingMaker(kind, N), **kwargs)


@pytest.mark.parametrize("delivery", LIGHT[1:])
def test_max_frames_per_traj_in_workers(delivery: str) -> None:
    maker = CountingMaker("plain", N, lengths=(100,))
    run(DELIVERIES[delivery], maker, cut_after=5, max_frames_per_traj=5)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "async-same-live", "native-disabled"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_reset_at_each_iter(delivery: str, kind: str) -> None:
    run(DELIVERIES[delivery], CountingMaker(kind, N), resets=True, reset_at_each_iter=True)


@pytest.mark.parametrize("option", [{"max_frames_per_traj": 3}, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("delivery", LIGHT)
def test_envs_that_cannot_be_cut_are_refused(delivery: str, option: dict[str, Any]) -> None:
    with pytest.raises((dc.ArgumentError, dc.WorkerError), match=f"{next(iter(option))} can't"):
        DELIVERIES[delivery].start(CountingMaker("native-next", N), **option)


INFO: Spec = {
    ("lap",): ((), _i64),
    ("flag",): ((), _bool),
    ("pair",): ((2,), _f64),
    ("nest", "depth"): ((), _i64),
    ("nest", "deeper", "echo"): ((), _f32),
    ("odd",): ((2,), torch.int32),
}


@pytest.mark.parametrize("kind", ["plain", "sync-same", "async-next", "native-next"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_info_keys(delivery: str, kind: str) -> None:
    keys = ["lap", "flag", "pair", "nest", "odd"]
    run(DELIVERIES[delivery], CountingMaker(kind, N), info=INFO, info_keys=keys)


def test_info_keys_with_spaces() -> None:
    spaces = {"odd": gym.spaces.Box(-99, 99, (2,), np.int32), "lap": None}
    info = {key: INFO[key] for key in (("odd",), ("lap",))}
    run(DELIVERIES["loopback-sync"], CountingMaker("plain", N), info=info, info_keys=spaces)


@pytest.mark.parametrize("delivery", LIGHT)
def test_init_random_frames(delivery: str) -> None:
    """Random actions, and nothing written by the policy, for the first batches only."""
    policy = Teller(1.0)
    way = DELIVERIES[delivery]
    batch_frames = int(np.prod(way.shape(way.num_workers, N, T)))
    oracle = run(
        way,
        CountingMaker("plain", N),
        policy,
        extras=Teller.SPEC,
        init_random_frames=2 * batch_frames - 1,
        batches=8,
    )
    random = [not batch["told"].any() for batch in oracle.clones]
    assert sum(random) == 2
    # Rollouts of two workers may overtake each other.
    assert not any(random[2 if way.on_policy else 5 :])
    for batch, is_random in zip(oracle.clones, random, strict=True):
        chosen = batch["observation"].sum(-1).long() % 5
        assert torch.equal(batch["action"], chosen) != is_random
        assert bool(batch["sum"].any()) != is_random


class RampMaker:
    """Makers with a context: an env for each slot and row."""

    def __call__(self, context: dc.EnvContext) -> CountingEnv:
        assert context.incarnation == 0
        return CountingEnv(context.worker_id * N + context.env_index, "dict", "box")


@pytest.mark.parametrize("delivery", LIGHT)
def test_makers_with_a_context(delivery: str) -> None:
    way = DELIVERIES[delivery]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(RampMaker(), *args, **kw))
    run(started, CountingMaker("plain", N, "dict", "box"))


@pytest.mark.parametrize("delivery", [*LIGHT[1:], "rpc-async"])
def test_a_maker_for_each_worker(delivery: str) -> None:
    makers = [CountingMaker(kind, N, "tuple") for kind in ("plain", "sync-same")]
    way = DELIVERIES[delivery]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(makers, *args, **kw))
    run(started, makers[0])


@pytest.mark.parametrize("instances", [False, True])
def test_a_maker_for_each_env_in_this_process(instances: bool) -> None:
    given = [CountingEnv(i) if instances else partial(CountingEnv, i) for i in range(N)]
    way = DELIVERIES["in-process"]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(given, *args, **kw))
    run(started, CountingMaker("plain", N), envs=1, frames_per_batch=N * T)


class Beyond(nn.Module):
    """Actions outside the bounds of a Box, on both sides."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        up = observation.sum(-1, keepdim=True) % 5 - 2.5
        return torch.cat([up, -up / 4], -1)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-next"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_clip_actions(delivery: str, kind: str) -> None:
    """The env gets clipped actions (it checks), the batch those that were chosen."""
    maker = CountingMaker(kind, N, action="box")
    kwargs = {"clip_actions": True, "shown": lambda action: np.clip(action, -1, 1)}
    oracle = run(DELIVERIES[delivery], maker, Beyond(), **kwargs)
    for batch in oracle.clones:
        assert torch.equal(batch["action"], Beyond()(batch["observation"]))
        assert batch["action"].abs().max() > 1


def test_actions_are_passed_on_as_they_are() -> None:
    with pytest.raises(dc.EnvError, match="is not in Box"):
        DELIVERIES["in-process"].start(CountingMaker("plain", N, action="box"), Beyond()).next()


# Weights and versions.


@pytest.mark.parametrize(
    ("delivery", "kind"),
    [*((light, kind) for light in LIGHT for kind in ("plain", "native-next"))]
    + [(heavy, "plain") for heavy in HEAVY],
)
def test_frames_know_their_policy_version(delivery: str, kind: str) -> None:
    """What the weights say is the stamp; on-policy batches are of the newest version only."""
    way, policy = DELIVERIES[delivery], Teller()
    oracle = Oracle(way, CountingMaker(kind, N), extras=Teller.SPEC)
    with way.start(oracle.maker, policy) as collector:
        for version in range(6):
            if version:
                with torch.no_grad():
                    policy.told.fill_(version)
                collector.update_policy_weights_(policy)
            assert collector.policy_version == version
            oracle.take(collector.next(timeout_s=60))
            versions = oracle.clones[-1]["collector", "policy_version"]
            assert versions.max() <= version
            assert not way.on_policy or versions.min() == version, "an older frame"
        # Those collected ahead get through, however slow their worker is.
        while not (oracle.clones[-1]["collector", "policy_version"] == 5).all():
            oracle.take(collector.next(timeout_s=60))
            assert len(oracle.clones) < 200
    oracle.check()
    for batch in oracle.clones:
        policy.check(batch)


@pytest.mark.parametrize("delivery", ["loopback-sync", "loopback-async"])
def test_selected_workers_get_weights(delivery: str) -> None:
    way = DELIVERIES[delivery]
    seen: dict[int, set[int]] = {0: set(), 1: set()}
    with way.start(CountingMaker("plain", N), Teller()) as collector:
        for worker_id, version in ((1, 1), ([0], 2), (slice(1, 2), 3)):
            collector.update_policy_weights_(Teller(version), worker_ids=worker_id)
            for _ in range(6):
                batch = collector.next(timeout_s=60)
                Teller().check(batch)
                for row in batch["collector"].reshape(-1, T).unbind(0):
                    seen[int(row["worker_id"][0])] |= set(row["policy_version"].tolist())
    assert seen[0] <= {0, 2}
    assert seen[1] <= {0, 1, 3}
    assert way.on_policy is False or seen == {0: {0, 2}, 1: {1, 3}}


def test_training_in_place_shows_at_once() -> None:
    policy = Teller()
    with DELIVERIES["in-process"].start(CountingMaker("native-next", N), policy) as collector:
        for value in range(4):
            with torch.no_grad():
                policy.told.fill_(value)
            assert (collector.next()["told"] == value).all()


# The iterable.


@pytest.mark.parametrize("delivery", LIGHT)
def test_total_frames(delivery: str) -> None:
    way = DELIVERIES[delivery]
    frames = int(np.prod(way.shape(way.num_workers, N, T)))
    with pytest.warns(UserWarning, match=f"{3 * frames} frames will be collected") as caught:
        collector = way.collector(
            CountingMaker("plain", N),
            frames_per_batch=frames,
            envs_per_worker=N,
            total_frames=2 * frames + 1,
        )
    assert way.collector is not dc.SyncDataCollector or caught[0].filename == __file__
    oracle = Oracle(way, CountingMaker("plain", N))
    with collector:
        assert collector.total_frames == 3 * frames
        for batch in collector:
            oracle.take(batch)
            assert collector.frames == len(oracle.clones) * frames
            break
        for batch in collector:  # goes on
            oracle.take(batch)
        assert len(oracle.clones) == 3
        assert list(collector) == []
        with pytest.raises(StopIteration):
            collector.next()
    oracle.check()


@pytest.mark.parametrize("delivery", LIGHT)
def test_endless_by_default(delivery: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collector = DELIVERIES[delivery].start(CountingMaker("plain", N), steps=2)
    with collector:
        assert collector.total_frames == -1
        assert sum(1 for _ in zip(range(100), collector, strict=False)) == 100


@pytest.mark.parametrize("delivery", LIGHT)
def test_use_after_shutdown(delivery: str) -> None:
    with DELIVERIES[delivery].start(CountingMaker("plain", N)) as collector:
        collector.next(timeout_s=60)
    collector.shutdown()
    with pytest.raises(dc.CollectorStateError, match="shut down"):
        collector.next()
    with pytest.raises(dc.CollectorStateError, match="shut down"):
        next(iter(collector))


# Seeds.


class Chancy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> Categorical:
        return Categorical(logits=self.net(observation))


@pytest.mark.parametrize("delivery", ["in-process", "rpc-sync"])
def test_same_seed_same_batches(delivery: str) -> None:
    """Bit for bit: the envs, random actions at the start, and then the policy's own noise."""
    torch.manual_seed(0)
    policy = Chancy()

    def collect(*seeds: int) -> list[TensorDict]:
        options = {"init_random_frames": 50}
        with DELIVERIES[delivery].start("CartPole-v1", policy, **options) as collector:
            batches = []
            for seed in seeds:
                assert collector.set_seed(seed) != seed
                batches += [collector.next(timeout_s=60) for _ in range(4)]
        # Ids are never used again, so each collector's start elsewhere.
        for worker_id in range(DELIVERIES[delivery].num_workers):
            rows = slice(worker_id * N, (worker_id + 1) * N)
            first = batches[0]["collector", "traj_ids"][rows].min().item()
            for batch in batches:
                batch["collector", "traj_ids"][rows] -= first
        return batches

    first, again = collect(3, 4), collect(3, 4)
    for one, other in zip(first, again, strict=True):
        assert same(one, other)
    assert not torch.equal(first[3]["observation"], first[7]["observation"])


@pytest.mark.parametrize(
    ("delivery", "static_seed"),
    [("loopback-sync", False), ("loopback-sync", True), ("rpc-sync", False)],
)
def test_trajectories_do_not_depend_on_the_number_of_workers(
    delivery: str, static_seed: bool
) -> None:

    def collect(num_workers: int) -> TensorDict:
        way = DELIVERIES[delivery if num_workers else "in-process"]
        settings = {"num_workers": num_workers} if num_workers else {}
        settings |= {"frames_per_batch": 4 * 50, "envs": 4 // (num_workers or 1)}
        with way.start("CartPole-v1", **settings) as collector:
            collector.next(timeout_s=60)  # what came before makes no difference
            collector.set_seed(11, static_seed=static_seed)
            batches = [collector.next(timeout_s=60) for _ in range(2)]
        return torch.cat([b.reshape(4, 50) for b in batches], 1).exclude("collector")

    expected = collect(0)
    assert expected["next", "done"].sum() > 4
    rows = [tuple(row.flatten().tolist()) for row in expected["observation"]]
    assert len(set(rows)) == (1 if static_seed else 4)
    for num_workers in (1, 2, 4) if delivery == "loopback-sync" else (2,):
        assert same(collect(num_workers), expected)


def test_a_seed_counts_from_the_next_batch_on() -> None:
    """Also where rollouts of before were collected ahead."""

    def first_after(seed: int, batches_before: int) -> TensorDict:
        settings = {"num_workers": 1, "envs": 2}
        with DELIVERIES["loopback-async"].start("CartPole-v1", **settings) as collector:
            for _ in range(batches_before):
                collector.next(timeout_s=60)
            collector.set_seed(seed)
            return collector.next(timeout_s=60).exclude("collector")

    assert same(first_after(5, 0), first_after(5, 2))


class SlowAtFirst(gym.Wrapper[Any, Any, Any, Any]):
    """The first steps take a while."""

    left = 3

    def step(self, action: Any) -> Any:
        if self.left:
            self.left -= 1
            time.sleep(0.2)
        return super().step(action)


def test_a_sync_batch_that_came_too_late_is_not_the_next_one() -> None:
    """What was asked for before the deadline passed is older than the next question."""
    policy = Teller()
    with dc.RPCDataCollector(
        lambda: SlowAtFirst(gym.make("CartPole-v1")),
        policy,
        frames_per_batch=2 * T,
        num_workers=2,
        sync=True,
    ) as collector:
        with pytest.raises(dc.BatchTimeout, match=r"waited for workers \[0, 1\]"):
            collector.next(timeout_s=0.05)
        with torch.no_grad():
            policy.told.fill_(1)
        collector.update_policy_weights_()
        batch = collector.next(timeout_s=60)
        assert batch.shape == (2, T)
        assert (batch["collector", "policy_version"] == 1).all()
        assert (batch["told"] == 1).all()
