"""What bounds a run, from invented figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from distcollect.results import (
    InferenceStats,
    Lags,
    Stats,
    TrainerTimes,
    WorkerStats,
    WorkerTimes,
)
from distcollect.telemetry.bottleneck import find_bottleneck

BUSY = WorkerTimes(env=0.9, policy=0.05, other=0.05, cpu=0.2)


def run(trainer: TrainerTimes, times: WorkerTimes, *, num: int = 2, **about: Any) -> Stats:
    workers = {w: WorkerStats(frames=50, times=times) for w in range(num)}
    about = {"collector": "X", "elapsed_s": 10.0, "delivered": 100, **about}
    return Stats(trainer=trainer, times=times, workers=workers, **about)


def test_async_workers_help_until_the_trainer_never_waits() -> None:
    # Each batch takes the trainer a fifth of its time: five times as many would do.
    stats = run(TrainerTimes(train=0.2, collect=0.8), BUSY)
    found = find_bottleneck(stats)
    assert found.bound == "env"
    assert found.shares["trainer"] == 0.2
    assert found.shares["env"] == pytest.approx(0.8 * 0.9)
    assert sum(found.shares.values()) == pytest.approx(1)
    wanted = 2 / (1 - 0.8 * 0.95)
    assert found.more_workers == math.ceil(wanted) - 2
    assert f"About {found.more_workers} more workers would still help." in found.sentence
    assert "use a CPU for 20%" in found.sentence
    idle = replace(BUSY, env=0.0, policy=0.0, other=0.0, wait=1.0)
    done = find_bottleneck(run(TrainerTimes(train=1.0), idle))
    assert (done.bound, done.more_workers) == ("trainer", 0)
    assert done.sentence.endswith("More workers would not help.")


@pytest.mark.parametrize("sync", [False, True])
def test_envs_and_policy_count_as_one(sync: bool) -> None:
    # The trainer's share is the largest single one, but it waits for more than half of its time.
    times = WorkerTimes(env=0.5, policy=0.5)
    found = find_bottleneck(run(TrainerTimes(train=0.4, collect=0.6), times, sync=sync))
    assert found.bound == "env"
    assert found.shares["env"] < found.shares["trainer"] == 0.4
    assert "more workers would still help." in found.sentence


def test_more_workers_shorten_only_the_rest() -> None:
    found = find_bottleneck(run(TrainerTimes(train=0.6, collect=0.4), BUSY, sync=True))
    assert found.bound == "trainer"
    assert found.more_workers > 0
    assert "still help" not in found.sentence
    assert found.sentence.endswith(
        "The trainer waits for envs and policy for only 38% of the time; about "
        f"{found.more_workers} more workers would shorten that."
    )


def test_it_says_when_workers_that_are_ahead_make_the_lag() -> None:
    slow = TrainerTimes(train=1.0)
    idle = WorkerTimes(wait=1.0)
    lag = Lags({3: 8, 4: 2})
    ahead = run(slow, idle, lag=lag, mean_ready=3.0, policy_version=9, has_weights=True)
    assert "lag by 3.2 versions" in find_bottleneck(ahead).sentence
    assert "3.0 rollouts waited" in find_bottleneck(ahead).sentence
    for other in (
        replace(ahead, mean_ready=0.2),  # the weights' way makes the lag
        replace(ahead, lag=Lags()),
        replace(ahead, sync=True),
        replace(ahead, in_process=True),
    ):
        assert "lag" not in find_bottleneck(other).sentence


def test_workers_that_wait_for_their_turn_are_no_round_trips() -> None:
    """Mode "pace" lets few collect at a time; more of them would wait, too."""
    waiting = WorkerTimes(env=0.3, policy=0.1, wait=0.6)
    paced = run(TrainerTimes(train=0.1, collect=0.9), waiting, staleness="pace")
    found = find_bottleneck(paced)
    assert (found.bound, found.more_workers) == ("env", 0)
    assert found.sentence.endswith(
        "More workers would not help. Workers are idle for 60% of the time, lest frames get older "
        "than Staleness allows: a higher bound keeps them busy."
    )
    assert find_bottleneck(replace(paced, staleness="")).bound == "network"
    busy = replace(paced, times=BUSY)
    assert "idle" not in find_bottleneck(busy).sentence
    assert find_bottleneck(busy).more_workers > 0


@pytest.mark.parametrize("mode", ["pace", "drop", "mask"])
def test_who_has_bounded_the_lag_is_not_told_to(mode: str) -> None:
    ahead = run(TrainerTimes(train=1.0), WorkerTimes(wait=1.0), lag=Lags({3: 8}), mean_ready=3.0)
    assert "Staleness" in find_bottleneck(replace(ahead, policy_version=9)).sentence
    bounded = replace(ahead, policy_version=9, staleness=mode)
    assert "Staleness" not in find_bottleneck(bounded).sentence


def test_a_worker_whose_frames_are_too_old_is_named() -> None:
    stats = run(TrainerTimes(collect=1.0), BUSY, staleness="drop")
    starved = WorkerStats(frames=10, times=BUSY, lost={"stale": 90})
    stats = replace(stats, workers={**stats.workers, 1: starved})
    says = "90% of the frames of worker 1 were dropped as too old. "
    assert says + "Staleness(mode='pace') waits for it. A" in find_bottleneck(stats).sentence
    assert says + "A higher" in find_bottleneck(replace(stats, staleness="pace")).sentence
    some = replace(starved, frames=100)
    stats = replace(stats, workers={**stats.workers, 1: some})
    assert "too old" not in find_bottleneck(stats).sentence


def test_an_inference_server_that_queues_needs_no_more_workers() -> None:
    served = InferenceStats(num_answers=100, queue_s=0.009, forward_s=0.001)
    times = WorkerTimes(policy=0.8, env=0.2, cpu=0.2)
    stats = run(TrainerTimes(collect=1.0), times, inference=served)
    found = find_bottleneck(stats)
    assert (found.bound, found.more_workers) == ("policy", 0)
    assert "9 of 10 ms queued" in found.sentence
    assert found.sentence.endswith("More workers would not help.")
    idle = replace(stats, inference=replace(served, queue_s=0.0001))
    assert find_bottleneck(idle).more_workers > 0
    assert "ewer workers" not in find_bottleneck(idle).sentence


def test_envs_that_compute_do_not_wait_while_an_inference_server_does() -> None:
    served = InferenceStats(num_answers=100, queue_s=0.001, forward_s=0.001)
    times = WorkerTimes(policy=0.4, env=0.6, cpu=0.6)
    stats = run(TrainerTimes(collect=1.0), times, inference=served)
    assert "Faster envs help." in find_bottleneck(stats).sentence
    own = find_bottleneck(replace(stats, inference=InferenceStats()))
    assert "use a CPU for 60%" in own.sentence


def test_it_says_when_no_weights_were_published() -> None:
    never = run(TrainerTimes(train=1.0), BUSY, has_weights=True)
    assert "No weights were published" in find_bottleneck(never).sentence
    for other in (
        replace(never, policy_version=1),
        replace(never, has_weights=False),
        replace(never, in_process=True),
        replace(never, elapsed_s=1.0),
    ):
        assert "No weights were published" not in find_bottleneck(other).sentence


def test_more_sync_workers_help_until_collecting_is_a_small_part() -> None:
    times = WorkerTimes(env=0.5, wait=0.5)
    stats = run(TrainerTimes(train=0.5, collect=0.5), times, sync=True)
    found = find_bottleneck(stats)
    # With 9 times as many workers it takes 1/18 of what was the whole: a tenth of what is left.
    assert found.more_workers == 2 * 9 - 2
    hardly = run(TrainerTimes(train=0.95, collect=0.05), times, sync=True)
    assert find_bottleneck(hardly).more_workers == 0
    all_of_it = run(TrainerTimes(collect=1.0), WorkerTimes(env=1.0), sync=True)
    assert find_bottleneck(all_of_it).more_workers == math.inf
    assert "Many more workers" in find_bottleneck(all_of_it).sentence


def test_what_has_no_workers_is_bound_by_no_network() -> None:
    idle = WorkerTimes(env=0.2, policy=0.2, other=0.6)
    found = find_bottleneck(run(TrainerTimes(collect=1.0), idle, num=1, in_process=True))
    assert found.bound == "network"
    assert str(found).startswith("Bound by writing frames to memory")
    assert "envs_per_worker" in str(found)


def test_a_run_that_has_only_begun_says_so() -> None:
    assert find_bottleneck(Stats(elapsed_s=3.0)).bound == "unknown"
    stats = run(TrainerTimes(collect=1.0), BUSY, elapsed_s=0.25)
    assert str(find_bottleneck(stats)).endswith(" That is from 0.25 s only.")


def test_workers_that_are_gone_take_no_cores_and_hold_nobody_up() -> None:
    slow = WorkerTimes(env=1.0, cpu=0.9)
    fast = WorkerTimes(env=0.2, wait=0.8, cpu=0.9)
    stats = run(TrainerTimes(train=0.3, collect=0.7), slow, num=1, num_cores=8, sync=True)
    gone = {w: WorkerStats(state="left", frames=50, times=slow) for w in range(1, 10)}
    stats = replace(stats, workers={**stats.workers, **gone})
    assert "cores" not in str(find_bottleneck(replace(stats, sync=False)))
    here = {w: WorkerStats(frames=50, times=fast) for w in range(2)}
    assert "holds" not in str(find_bottleneck(replace(stats, workers={**gone, **here})))


@pytest.mark.parametrize(
    ("num_cores", "more", "says"),
    [
        (0, 7, "About 7 more workers would still help."),
        (2, 0, "More workers would help on other hosts only: these 2 cores are busy."),
        (6, 4, "About 4 more workers would still help: 6 cores have no room for others."),
        (64, 7, "About 7 more workers would still help."),
    ],
)
def test_cores_limit_what_computes(num_cores: int, more: int, says: str) -> None:
    computing = replace(BUSY, cpu=0.95)
    stats = run(TrainerTimes(train=0.2, collect=0.8), computing, num_cores=num_cores)
    found = find_bottleneck(stats)
    assert found.more_workers == more
    assert says in str(found)
    waiting = find_bottleneck(replace(stats, times=BUSY))
    assert waiting.more_workers == 7  # their envs wait for something else than a core
    doubt = f"7 more workers would still help, unless other processes keep the {num_cores} cores"
    assert (doubt in str(waiting)) == (num_cores in (2, 6))


@pytest.mark.parametrize(("load", "more"), [(0.0, 7), (2.4, 7), (4.0, 4), (8.0, 0), (99.0, 0)])
def test_cores_that_others_keep_busy_are_not_advised(load: float, more: int) -> None:
    """Of 8 cores; of the load, 2 are the workers."""
    stats = run(TrainerTimes(train=0.2, collect=0.8), BUSY, num_cores=8, load=load)
    found = find_bottleneck(stats)
    assert found.more_workers == more
    says = "these 8 cores are busy, about 6 of them with other processes" if load == 8 else ""
    assert says in str(found)


def test_a_sync_worker_that_holds_the_others_up_is_named() -> None:
    stats = run(TrainerTimes(collect=1.0), WorkerTimes(env=0.4, wait=0.6), num=4, sync=True)
    slow = WorkerStats(frames=50, times=WorkerTimes(env=1.0))
    fast = WorkerStats(frames=50, times=WorkerTimes(env=0.2, wait=0.8))
    stats = replace(stats, workers={0: fast, 1: fast, 2: slow, 3: fast})
    assert find_bottleneck(stats).bound == "env"
    assert "Worker 2 holds the others up" in find_bottleneck(stats).sentence
    assert "holds" not in find_bottleneck(replace(stats, sync=False)).sentence


@pytest.mark.parametrize(
    ("trainer", "times", "bound", "says"),
    [
        (TrainerTimes(transfer=0.7, collect=0.3), BUSY, "network", "A frame has 1,000 bytes"),
        (TrainerTimes(assemble=0.7, collect=0.3), BUSY, "network", "copying on the trainer"),
        (TrainerTimes(collect=1.0), WorkerTimes(env=0.1, wait=0.9), "network", "round trips"),
        (TrainerTimes(weights=0.7, collect=0.3), BUSY, "weights", "wait=False"),
        (TrainerTimes(collect=1.0), WorkerTimes(policy=0.8, env=0.2), "policy", "compiled"),
    ],
)
def test_what_would_help(trainer: TrainerTimes, times: WorkerTimes, bound: str, says: str) -> None:
    found = find_bottleneck(run(trainer, times, num_bytes=100_000))
    assert found.bound == bound
    assert says in str(found)
