"""The data contract of batches, and the oracle that checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from helpers.counting_envs import (
    ACTIONS,
    FILLER_KINDS,
    OBSERVATIONS,
    CountingMaker,
    Frame,
    check_frames,
)
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDictBase

import distcollect as dc
from distcollect.rollout.spaces import flatten

N, T = 3, 7
Spec = dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class BatchFormat:
    """One way to get batches: a collector class with its settings.

    Attributes:
        collector: makes a collector; the class with its settings.
        num_workers: number of processes or threads that step envs.
        on_policy: each batch has the rows of all workers in order; nothing is collected ahead.
        shape: the batch's shape, given the workers, the envs per worker and the steps.
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


def _rpc(collector: Callable[..., Any], *, sync: bool) -> BatchFormat:
    start = partial(collector, num_workers=2, sync=sync)
    return BatchFormat(start, 2, sync, _all_rows if sync else _own_rows)


DELIVERIES = {
    "in-process": BatchFormat(dc.SyncDataCollector, 1, True, _own_rows),
    "loopback-sync": _rpc(loopback_collector, sync=True),
    "loopback-async": _rpc(loopback_collector, sync=False),
    "rpc-sync": _rpc(dc.RPCDataCollector, sync=True),
    "rpc-multia": BatchFormat(
        partial(dc.MultiaSyncDataCollector, num_workers=2), 2, False, _own_rows
    ),
}


# These start no processes, so they are fast enough for the full cross product.
LIGHT = [name for name in DELIVERIES if not name.startswith("rpc")]
_f32, _f64, _i64 = torch.float32, torch.float64, torch.int64
_bool = torch.bool


def _spec_of(space: gym.Space[Any], key: tuple[str, ...]) -> Spec:
    """The entries of a batch, in the order of the space; Gymnasium sorts those of a Dict."""
    match space:
        case spaces.Dict() | spaces.Tuple():
            parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
            specs = [_spec_of(part, (*key, str(name))) for name, part in parts]
            return {name: spec for each in specs for name, spec in each.items()}
        case spaces.Discrete():
            return {key: ((), _i64)}
        case _:
            return {key: (space.shape, getattr(torch, space.dtype.name))}


OBSERVATION_SPECS = {
    name: _spec_of(coding.space, () if isinstance(coding.space, spaces.Dict) else ("observation",))
    for name, coding in OBSERVATIONS.items()
}
ACTION_SPECS = {name: _spec_of(space, ("action",)) for name, space in ACTIONS.items()}


SPACES = [
    ("box32", "discrete"),
    ("dict", "dict"),
    ("box64", "box_scalar"),
    ("image", "box"),
    ("discrete", "multidiscrete"),
    ("multidiscrete", "discrete_start"),
    ("multibinary", "multibinary"),
    ("tuple", "tuple"),
    ("dtypes", "dtypes"),
]


ENDS: Spec = {(name,): ((1,), _bool) for name in ("done", "terminated", "truncated")}


IDS: Spec = {
    ("collector", name): ((), _i64) for name in ("traj_ids", "policy_version", "worker_id")
} | {("collector", "faulted"): ((), _bool)}


class Noter:
    """A policy for any spaces: chooses random actions, and records the sum of what it saw."""

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
        """The weighted sum over the observations in ``td``; all other entries are skipped."""
        skipped = {"action", "collector", "deep", "done", "next", "seen", "terminated", "truncated"}
        parts = [value for key, value in sorted(_leaves(td).items()) if key[0] not in skipped]
        sums = [part.double().reshape(*td.shape, -1).sum(-1) for part in parts]
        return sum(index * part for index, part in enumerate(sums, start=1))

    def check(self, batch: TensorDictBase) -> None:
        assert torch.allclose(batch["seen"], self.seen(batch))
        assert torch.equal(batch["deep", "twice"][..., 1], batch["seen"].float())


def _leaves(td: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    return {
        (key,) if isinstance(key, str) else key: value
        for key, value in td.items(include_nested=True, leaves_only=True)
    }


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Whether both have the same bits; NaN equals NaN."""
    mine, its = _leaves(one), _leaves(other)
    return mine.keys() == its.keys() and all(
        value.numpy().tobytes() == its[key].numpy().tobytes() for key, value in mine.items()
    )


@dataclass
class Oracle:
    """Checks the batches of one collector; follows each row over all of them.

    Attributes:
        info: specs of the info entries in a batch.
        extras: specs of the entries that the policy writes.
        shown: turns the action in the batch into the action that the env was given.
    """

    delivery: BatchFormat
    maker: CountingMaker
    info: Spec = field(default_factory=dict)
    extras: Spec = field(default_factory=dict)
    shown: Callable[[np.ndarray], np.ndarray] | None = None
    clones: list[TensorDictBase] = field(default_factory=list)
    _last: TensorDictBase | None = None

    def take(self, batch: TensorDictBase) -> None:
        """Check what can be checked in this batch alone; then overwrite it."""
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
        # Frames may be missing here: rows of these envs drift apart, and nothing is kept.
        gaps = self.maker.kind in FILLER_KINDS and self.delivery.on_policy
        for (worker_id, row), parts in self._rows().items():
            for piece in parts if gaps else [torch.cat(parts)]:
                assert check_frames(
                    self._frames(piece),
                    number=worker_id * self.maker.num_envs + row,
                    observation=self.maker.observation,
                    action=self.maker.action,
                    lengths=self.maker.lengths,
                    info_keys=list(self.info),
                ) == len(piece)

    def _check_structure(self, batch: TensorDictBase) -> None:
        workers, envs = self.delivery.num_workers, self.maker.num_envs
        shape = self.delivery.shape(workers, envs, T)
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
        ids = batch["collector", "worker_id"].reshape(-1, T)
        if self.delivery.on_policy:
            wanted = torch.arange(workers).repeat_interleave(envs)
        else:
            wanted = ids[0, 0].expand(envs)
        assert torch.equal(ids, wanted[:, None].expand(-1, T))

    def _rows(self) -> dict[tuple[int, int], list[TensorDictBase]]:
        rows: dict[tuple[int, int], list[TensorDictBase]] = {}
        for batch in self.clones:
            for index, row in enumerate(batch.reshape(-1, T).unbind(0)):
                worker_id = int(row["collector", "worker_id"][0])
                rows.setdefault((worker_id, index % self.maker.num_envs), []).append(row)
        return rows

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
    """The user may do anything with a batch: it shares no memory and needs no gradient."""
    leaves = _leaves(batch)
    storages = [value.untyped_storage().data_ptr() for value in leaves.values()]
    assert len(set(storages)) == len(storages), "two entries share memory"
    for value in leaves.values():
        assert not value.is_inference()
        assert not value.requires_grad
        # Each element has its own memory: no tensor is expanded.
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
    """Collect and check batches until each worker has delivered one; return the oracle."""
    known = {"info", "extras", "shown"}
    about = {key: kwargs.pop(key) for key in known & kwargs.keys()}
    oracle = Oracle(delivery, maker, **about)
    settings = {"envs": maker.num_envs, **kwargs}
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


INFO: Spec = {
    ("lap",): ((), _i64),
    ("ratio",): ((), _f32),
    ("flag",): ((), _bool),
    ("pair",): ((2,), _f64),
    ("nest", "depth"): ((), _i64),
    ("nest", "deeper", "echo"): ((), _f32),
    ("stepped",): ((), _i64),
    ("odd",): ((2,), torch.int32),
}


def check_info_keys(delivery: str, kind: str) -> None:
    keys = list(dict.fromkeys(key[0] for key in INFO))
    run(DELIVERIES[delivery], CountingMaker(kind, N), info=INFO, info_keys=keys)


def check_a_maker_for_each_worker(delivery: str) -> None:
    makers = [CountingMaker(kind, N, "tuple") for kind in ("plain", "sync-same")]
    way = DELIVERIES[delivery]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(makers, *args, **kw))
    run(started, makers[0])
