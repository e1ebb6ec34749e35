"""The data contract, kept by every collector class with every kind of env, in one process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.batch_checks import (
    INFO,
    check_a_maker_for_each_worker,
    check_every_env_kind,
    check_frames_know_their_policy_version,
    check_info_keys,
    check_max_frames_per_traj,
    check_reset_at_each_iter,
    check_same_seed_same_batches,
    check_trajectories_do_not_depend_on_the_number_of_workers,
)
from helpers.batch_contract import (
    DELIVERIES,
    LIGHT,
    SPACES,
    N,
    Oracle,
    T,
    Teller,
    check_contract,
    run,
    same,
)
from helpers.counting_envs import (
    IN_PROCESS_KINDS,
    UNCUTTABLE_KINDS,
    CountingEnv,
    CountingMaker,
    CountingVectorEnv,
    check_frames,
)
from tensordict import TensorDict, TensorDictBase
from torch import nn

import distcollect as dc


@pytest.mark.parametrize("kind", IN_PROCESS_KINDS)
@pytest.mark.parametrize("spaces", SPACES[:2], ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_env_kind(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_every_env_kind(delivery, kind, spaces)


@pytest.mark.parametrize("kind", ["plain", "sync-same", "native-next", "native-disabled"])
@pytest.mark.parametrize("spaces", SPACES[2:], ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_space(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
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
    """Frames without room are left out, and no wrong frame remains."""
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


@pytest.mark.parametrize(
    "kind", [kind for kind in IN_PROCESS_KINDS if kind not in UNCUTTABLE_KINDS]
)
@pytest.mark.parametrize("longest", [1, 3])
def test_max_frames_per_traj(kind: str, longest: int) -> None:
    check_max_frames_per_traj(kind, longest)


@pytest.mark.parametrize("delivery", LIGHT[1:])
def test_max_frames_per_traj_in_workers(delivery: str) -> None:
    maker = CountingMaker("plain", N, lengths=(100,))
    run(DELIVERIES[delivery], maker, cut_after=5, max_frames_per_traj=5)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-disabled"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_reset_at_each_iter(delivery: str, kind: str) -> None:
    check_reset_at_each_iter(delivery, kind)


@pytest.mark.parametrize("option", [{"max_frames_per_traj": 3}, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("delivery", LIGHT)
def test_envs_that_cannot_be_cut_are_refused(delivery: str, option: dict[str, Any]) -> None:
    message = f"{next(iter(option))} does not work with this native vector env"
    with pytest.raises((dc.ArgumentError, dc.WorkerError), match=message):
        DELIVERIES[delivery].start(CountingMaker("native-next", N), **option)


@pytest.mark.parametrize("kind", ["plain", "sync-same", "native-next"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_info_keys(delivery: str, kind: str) -> None:
    check_info_keys(delivery, kind)


def test_info_keys_with_spaces() -> None:
    spaces = {"odd": gym.spaces.Box(-99, 99, (2,), np.int32), "lap": None}
    info = {key: INFO[key] for key in (("odd",), ("lap",))}
    run(DELIVERIES["loopback-sync"], CountingMaker("plain", N), info=info, info_keys=spaces)


@pytest.mark.parametrize("delivery", LIGHT)
def test_init_random_frames(delivery: str) -> None:
    """Only the first batches have random actions and no entries of the policy."""
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
    # Workers may be of any speed: the rollouts requested first may arrive late.
    if way.on_policy:
        assert random[:2] == [True, True]
    of_worker: dict[int, list[bool]] = {}
    for batch, is_random in zip(oracle.clones, random, strict=True):
        worker_id = int(batch["collector", "worker_id"].flatten()[0])
        of_worker.setdefault(worker_id, []).append(is_random)
    for flags in of_worker.values():
        assert flags == sorted(flags, reverse=True), "random ones come first"
    for batch, is_random in zip(oracle.clones, random, strict=True):
        chosen = batch["observation"].sum(-1).long() % 5
        assert torch.equal(batch["action"], chosen) != is_random
        assert bool(batch["sum"].any()) != is_random


class RampMaker:
    """A maker with a context makes an env for each worker and row."""

    def __call__(self, context: dc.EnvContext) -> CountingEnv:
        assert context.incarnation == 0
        return CountingEnv(context.worker_id * N + context.env_index, "dict", "box")


@pytest.mark.parametrize("delivery", LIGHT)
def test_makers_with_a_context(delivery: str) -> None:
    way = DELIVERIES[delivery]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(RampMaker(), *args, **kw))
    run(started, CountingMaker("plain", N, "dict", "box"))


@pytest.mark.parametrize("delivery", LIGHT[1:])
def test_a_maker_for_each_worker(delivery: str) -> None:
    check_a_maker_for_each_worker(delivery)


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
    """The env gets clipped actions (it checks them); the batch has the chosen ones."""
    maker = CountingMaker(kind, N, action="box")
    kwargs = {"clip_actions": True, "shown": lambda action: np.clip(action, -1, 1)}
    oracle = run(DELIVERIES[delivery], maker, Beyond(), **kwargs)
    for batch in oracle.clones:
        assert torch.equal(batch["action"], Beyond()(batch["observation"]))
        assert batch["action"].abs().max() > 1


def test_actions_are_passed_on_as_they_are() -> None:
    with pytest.raises(dc.EnvError, match="is not in Box"):
        DELIVERIES["in-process"].start(CountingMaker("plain", N, action="box"), Beyond()).next()


@pytest.mark.parametrize(
    ("delivery", "kind"), [(light, kind) for light in LIGHT for kind in ("plain", "native-next")]
)
def test_frames_know_their_policy_version(delivery: str, kind: str) -> None:
    check_frames_know_their_policy_version(delivery, kind)


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


@pytest.mark.parametrize("delivery", ["in-process"])
def test_same_seed_same_batches(delivery: str) -> None:
    check_same_seed_same_batches(delivery)


@pytest.mark.parametrize(
    ("delivery", "static_seed"),
    [("loopback-sync", False), ("loopback-sync", True)],
)
def test_trajectories_do_not_depend_on_the_number_of_workers(
    delivery: str, static_seed: bool
) -> None:

    check_trajectories_do_not_depend_on_the_number_of_workers(delivery, static_seed)


def test_a_seed_counts_from_the_next_batch_on() -> None:
    """Also if earlier rollouts were collected ahead."""

    def first_after(seed: int, batches_before: int) -> TensorDict:
        settings = {"num_workers": 1, "envs": 2}
        with DELIVERIES["loopback-async"].start("CartPole-v1", **settings) as collector:
            for _ in range(batches_before):
                collector.next(timeout_s=60)
            collector.set_seed(seed)
            return collector.next(timeout_s=60).exclude("collector")

    assert same(first_after(5, 0), first_after(5, 2))
