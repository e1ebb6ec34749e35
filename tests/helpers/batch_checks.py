"""Checks of the data contract that hold in one process and in several."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers.batch_contract import (
    DELIVERIES,
    N,
    Oracle,
    Spec,
    Teller,
    _bool,
    _f32,
    _f64,
    _i64,
    check_contract,
    run,
    same,
)
from helpers.counting_envs import (
    CountingMaker,
)
from helpers.policies import CategoricalPolicy
from tensordict import TensorDict


def check_every_env_kind(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


def check_max_frames_per_traj(kind: str, longest: int) -> None:
    kwargs = {"cut_after": longest, "max_frames_per_traj": longest}
    run(DELIVERIES["in-process"], CountingMaker(kind, N), **kwargs)


def check_reset_at_each_iter(delivery: str, kind: str) -> None:
    run(DELIVERIES[delivery], CountingMaker(kind, N), resets=True, reset_at_each_iter=True)


INFO: Spec = {
    ("lap",): ((), _i64),
    ("flag",): ((), _bool),
    ("pair",): ((2,), _f64),
    ("nest", "depth"): ((), _i64),
    ("nest", "deeper", "echo"): ((), _f32),
    ("odd",): ((2,), torch.int32),
}


def check_info_keys(delivery: str, kind: str) -> None:
    keys = ["lap", "flag", "pair", "nest", "odd"]
    run(DELIVERIES[delivery], CountingMaker(kind, N), info=INFO, info_keys=keys)


def check_a_maker_for_each_worker(delivery: str) -> None:
    makers = [CountingMaker(kind, N, "tuple") for kind in ("plain", "sync-same")]
    way = DELIVERIES[delivery]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(makers, *args, **kw))
    run(started, makers[0])


def check_frames_know_their_policy_version(delivery: str, kind: str) -> None:
    """``policy_version`` is the version of the weights used; on-policy batches have the newest."""
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
        # Rollouts that were collected ahead still arrive, however slow their worker is.
        while not (oracle.clones[-1]["collector", "policy_version"] == 5).all():
            oracle.take(collector.next(timeout_s=60))
            assert len(oracle.clones) < 200
    oracle.check()
    for batch in oracle.clones:
        policy.check(batch)


def check_same_seed_same_batches(delivery: str) -> None:
    """Equal bit for bit: the envs, random actions at the start, the policy's noise, and all ids."""
    torch.manual_seed(0)
    policy = CategoricalPolicy()

    def collect(*seeds: int) -> list[TensorDict]:
        options = {"init_random_frames": 50}
        with DELIVERIES[delivery].start("CartPole-v1", policy, **options) as collector:
            batches = []
            for seed in seeds:
                assert collector.set_seed(seed) != seed
                batches += [collector.next(timeout_s=60) for _ in range(4)]
        return batches

    first, again = collect(3, 4), collect(3, 4)
    for one, other in zip(first, again, strict=True):
        assert same(one, other)
    assert not torch.equal(first[3]["observation"], first[7]["observation"])


def check_trajectories_do_not_depend_on_the_number_of_workers(
    delivery: str, static_seed: bool
) -> None:

    def collect(num_workers: int) -> TensorDict:
        way = DELIVERIES[delivery if num_workers else "in-process"]
        settings = {"num_workers": num_workers} if num_workers else {}
        settings |= {"frames_per_batch": 4 * 50, "envs": 4 // (num_workers or 1)}
        with way.start("CartPole-v1", **settings) as collector:
            collector.next(timeout_s=60)  # earlier batches make no difference
            collector.set_seed(11, static_seed=static_seed)
            batches = [collector.next(timeout_s=60) for _ in range(2)]
        return torch.cat([b.reshape(4, 50) for b in batches], 1).exclude("collector")

    expected = collect(0)
    assert expected["next", "done"].sum() > 4
    rows = [tuple(row.flatten().tolist()) for row in expected["observation"]]
    assert len(set(rows)) == (1 if static_seed else 4)
    for num_workers in (1, 2, 4) if delivery == "loopback-sync" else (2,):
        assert same(collect(num_workers), expected)
