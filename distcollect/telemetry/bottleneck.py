"""Finds what a run is bound by, and what would help most, from a snapshot of its statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distcollect.results import InferenceStats, Stats, WorkerStats

Bound = Literal["trainer", "env", "policy", "network", "weights", "unknown"]

# More workers help while the trainer waits for rollouts for more than this share of its time.
_WORTHWHILE = 0.1
_MANY = 10  # times the present number of workers
# A stepping thread that uses less of a CPU waits for something else, and leaves room for others.
_BUSY_CPU = 0.7
# A worker that loses more than this share of its frames, as they are too old, is named.
_LOSES_MANY = 0.5
# A worker that is busier than the mean by this factor holds the others up.
_STRAGGLER = 1.5
# The beginning of a run is mostly warm-up.
_BRIEF_S = 2.0


@dataclass(frozen=True)
class Bottleneck:
    """What a run is bound by.

    Attributes:
        bound: what takes most of the time: "trainer" (your code between two batches), the workers'
            "env" or "policy", "network" (writing frames to memory, moving rollouts, making
            batches, round trips; the text of a collector without workers says "frames") or
            "weights"; "unknown" before the first batch.
        shares: shares of the trainer's time by these names; they add up to 1.
        more_workers: how many more workers would still help on the cores of their hosts, as far as
            these are known; infinity: many.
        sentence: all of this in words, and what would help most.
    """

    bound: Bound
    shares: dict[str, float]
    more_workers: float
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def find_bottleneck(stats: Stats) -> Bottleneck:
    """The bottleneck of the whole run up to this snapshot."""
    if not stats.delivered or not stats.elapsed_s:
        return Bottleneck(
            "unknown", {}, 0, "Nothing was delivered yet, so the bottleneck is unknown."
        )
    shares = _shares(stats)
    bound = _bound(shares)
    waits = shares["env"] + shares["policy"]
    wanted = 0 if bound == "policy" and _queues(stats) else _more_workers(stats, waits)
    names = {"network": "frames"} if stats.in_process else {}
    parts = ", ".join(
        f"{names.get(name, name)} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    by, advice = _in_words(bound, stats)
    sentence = f"Bound by {by} (of the time: {parts}). {advice} "
    rest = waits if bound not in ("env", "policy") else None
    sentence += _on_workers(wanted, stats, rest) + _on_lag(stats) + _on_staleness(stats)
    if stats.inference_choice:
        sentence += f" {stats.inference_choice}."
    if stats.elapsed_s < _BRIEF_S:
        sentence += f" That is from {stats.elapsed_s:.2g} s only."
    return Bottleneck(bound, shares, min(wanted, _room(stats)), sentence)


def _bound(shares: Mapping[str, float]) -> Bound:
    """The largest share, where envs and policy count as one: more workers shorten both."""
    collecting: Bound = "env" if shares["env"] >= shares["policy"] else "policy"
    others: tuple[Bound, ...] = ("trainer", "network", "weights")
    largest = max(others, key=lambda name: shares[name])
    return collecting if shares["env"] + shares["policy"] >= shares[largest] else largest


def _shares(stats: Stats) -> dict[str, float]:
    """Shares of the trainer's time. While it waits for rollouts, what the workers do counts."""
    spent, work = stats.trainer, stats.times
    # Round trips: a worker waits for a request while the trainer waits for rollouts.
    waits = 0.0 if stats.in_process else _idle_while_wanted(stats)
    parts = {
        "env": work.env,
        "policy": work.policy,
        "weights": work.swap,
        "network": work.other + waits,
    }
    total = sum(parts.values()) or 1.0
    shares = {name: spent.collect * part / total for name, part in parts.items()}
    shares["trainer"] = spent.train
    shares["weights"] += spent.weights
    shares["network"] += spent.transfer + spent.assemble
    return shares


def _idle_while_wanted(stats: Stats) -> float:
    """Share of the workers' time in which they waited while the trainer waited for rollouts."""
    if _is_paced(stats):
        return 0.0  # they wait for their turn
    wait = stats.times.wait
    if stats.sync:
        # Workers also wait while the trainer does something else.
        wait -= 1 - stats.trainer.collect
        # They also wait for the slowest worker, which counts as time of envs or policy.
        busy = [1 - worker.times.wait for worker in _collecting(stats).values()]
        if busy:
            wait -= max(busy) - sum(busy) / len(busy)
    return max(0.0, wait)


def _collecting(stats: Stats) -> dict[int, WorkerStats]:
    """Workers that collected and are present; after the end of the run, all that collected."""
    collected = {w: worker for w, worker in stats.workers.items() if worker.frames}
    present = {w: each for w, each in collected.items() if each.state in ("ready", "suspected")}
    return present or collected


def _num_workers(stats: Stats) -> int:
    """How many processes collect for this one."""
    return 0 if stats.in_process else len(_collecting(stats))


def _more_workers(stats: Stats, waits: float) -> float:
    """How many more workers would help, if the trainer waits for this share of its time."""
    num_workers = max(1, len(_collecting(stats)))
    if waits <= _WORTHWHILE or _is_paced(stats):
        return 0
    others = 1 - waits
    if stats.sync and not stats.in_process:
        # With W' workers, collecting takes W / W' of its present time; the rest stays as it is.
        wanted = num_workers * waits / max(others, 1e-9) * (1 - _WORTHWHILE) / _WORTHWHILE
    elif stats.in_process:
        # Other processes would collect while this one trains.
        wanted = waits / max(others, 1e-9)
    else:
        # Workers collect all the time, and the trainer could take more rollouts.
        wanted = num_workers * (1 - stats.times.wait) / max(others, 1e-9)
    more = math.ceil(wanted) - _num_workers(stats)
    return math.inf if more > _MANY * num_workers else max(0, more)


def _in_words(bound: Bound, stats: Stats) -> tuple[str, str]:
    """Return what takes the time, and what would help most."""
    match bound:
        case "network":
            by = "moving rollouts to the trainer"
            if stats.in_process:
                by = "writing frames to memory and making batches of them"
            return by, _advice_on_network(stats)
        case "env":
            return "the envs", _advice_on_envs(stats)
        case "trainer":
            advice = "A faster training step helps most, or fewer of them for each batch."
            return "the trainer's own work between two batches", advice
        case "weights" if stats.in_process:
            advice = "Publish less often, or train the collector's own policy, which needs no copy."
            return "copying weights", advice
        case "weights":
            return "sending weights", (
                "Publish less often or with wait=False, or send less: "
                "WeightSync(wire_dtype='bfloat16'), changes_only, exclude."
            )
        case _:
            return _on_policy(stats.inference)


def _on_policy(served: InferenceStats) -> tuple[str, str]:
    if not served.num_answers:
        return "the policy's inference", (
            "A smaller or compiled policy helps, a GPU for it (policy_device), or more envs for "
            "each of its calls (envs_per_worker)."
        )
    queued, computed = served.queue_s * 1e3, served.forward_s * 1e3
    return f"the inference server: {queued:.2g} of {queued + computed:.2g} ms queued", (
        "A smaller or compiled policy helps, a GPU for it (policy_device), or more threads "
        "(Inference(num_threads=...))."
    )


def _queues(stats: Stats) -> bool:
    """Return True if an inference server has no time for more workers."""
    return stats.inference.queue_s > stats.inference.forward_s


def _cpu(stats: Stats) -> float:
    """The share of a CPU that a worker uses while it does not wait for an inference server."""
    times = stats.times
    served = times.policy if stats.inference.num_answers else 0.0
    own, busy = 1 - times.wait - served, 1 - times.wait
    return min(1.0, times.cpu * busy / own) if own > 0 else times.cpu


def _is_paced(stats: Stats) -> bool:
    """Return True if workers wait so that their frames don't get too old."""
    return stats.staleness == "pace" and min(stats.times.wait, stats.trainer.collect) > _WORTHWHILE


def _advice_on_envs(stats: Stats) -> str:
    busy = {w: 1 - each.times.wait for w, each in _collecting(stats).items()}
    slowest = max(busy, key=busy.__getitem__, default=0)
    if (
        stats.sync
        and len(busy) > 1
        and busy[slowest] >= _STRAGGLER * sum(busy.values()) / len(busy)
    ):
        return (
            f"Worker {slowest} holds the others up: give it less to do, or set "
            "preemptive_threshold."
        )
    if (cpu := _cpu(stats)) < _BUSY_CPU:
        return (
            f"Their threads use a CPU for {cpu:.0%} of that time only: the envs wait "
            "for something, or others take the CPU."
        )
    return "Faster envs help."


def _advice_on_network(stats: Stats) -> str:
    moved = stats.num_bytes / max(1, stats.delivered)
    if stats.trainer.assemble > max(stats.trainer.transfer, stats.trainer.collect):
        return (
            "Most of it is copying on the trainer: smaller observations help (uint8, "
            "compact_obs=True), or a lighter postproc or replay buffer."
        )
    if stats.in_process:
        return "More envs in each step help (envs_per_worker)."
    if stats.trainer.transfer > stats.trainer.collect:
        return (
            f"A frame has {moved:,.0f} bytes: smaller observations help (uint8 instead of floats, "
            "a lower resolution), or workers on the trainer's host."
        )
    return "Most of it is round trips: longer rollouts help, by a larger frames_per_batch."


def _on_lag(stats: Stats) -> str:
    """What to say if old weights choose the actions, and that is not the weights' slow way."""
    if stats.in_process:
        return ""
    if stats.has_weights and not stats.policy_version and stats.elapsed_s >= _BRIEF_S:
        return (
            " No weights were published, so the workers' policy is the one that they started with: "
            "update_policy_weights_() sends them newer weights."
        )
    is_bounded = stats.sync or stats.staleness or not stats.lag.max
    if is_bounded or stats.mean_ready < max(1.0, _num_workers(stats) / 2):
        return ""
    return (
        f" Frames lag by {stats.lag.mean:.1f} versions on average because the workers are ahead of "
        f"the trainer: {stats.mean_ready:.1f} rollouts waited when it asked for one. Fewer workers "
        "or Staleness(max_policy_lag=...) make the lag smaller."
    )


def _on_staleness(stats: Stats) -> str:
    """What to say if the bound on staleness costs workers their time or their frames."""
    for worker_id, worker in stats.workers.items():
        too_old, known = worker.lost.get("stale", 0), worker.frames + worker.num_lost
        if too_old > _LOSES_MANY * known:
            waits = "" if stats.staleness == "pace" else "Staleness(mode='pace') waits for it. "
            return (
                f" {too_old / known:.0%} of the frames of worker {worker_id} were dropped as too "
                f"old. {waits}A higher bound helps, or shorter rollouts."
            )
    if _is_paced(stats):
        return (
            f" Workers are idle for {stats.times.wait:.0%} of the time, lest frames get older than "
            "Staleness allows: a higher bound keeps them busy."
        )
    return ""


def _others(stats: Stats) -> int:
    """How many of these cores other processes than those of this run keep busy."""
    return max(0, min(stats.num_cores, round(stats.load) - _num_workers(stats)))


def _room(stats: Stats) -> float:
    """How many more workers the cores of the workers' hosts can keep up with; infinity: any."""
    if others := _others(stats):
        return max(0, stats.num_cores - others - _num_workers(stats))
    if not stats.num_cores or _cpu(stats) < _BUSY_CPU:
        return math.inf
    each = stats.times.cpu * (1 - stats.times.wait)  # cores that a worker keeps busy
    return max(0, round(stats.num_cores / each) - _num_workers(stats)) if each else math.inf


def _on_workers(wanted: float, stats: Stats, rest: float | None) -> str:
    """What more workers would do.

    Args:
        wanted: how many more would help if each had a core.
        stats: the statistics.
        rest: the share of time that they would shorten, if something else takes longer.
    """
    more = min(wanted, _room(stats))
    if not wanted:
        return "More workers would not help."
    if not more:
        others = _others(stats)
        by = f", about {others} of them with other processes" if others else ""
        return (
            f"More workers would help on other hosts only: these {stats.num_cores} cores are busy"
            f"{by}."
        )
    count = "many" if more == math.inf else f"about {more:.0f}"
    workers = "worker" if count == "about 1" else "workers"
    where = "" if more == wanted else f": {stats.num_cores} cores have no room for others"
    if 0 < stats.num_cores < _num_workers(stats) + more and _cpu(stats) < _BUSY_CPU:
        where = f", unless other processes keep the {stats.num_cores} cores busy"
    if stats.in_process:
        return f"A collector with workers could use {count} of them{where}."
    if rest is not None:
        return (
            f"The trainer waits for envs and policy for only {rest:.0%} of the time; {count} more "
            f"{workers} would shorten that{where}."
        )
    return f"{count.capitalize()} more {workers} would still help{where}."
