"""Settings of a collector that TorchRL doesn't have; each checks itself when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from distcollect.common import checks, torch_backends
from distcollect.common.checks import suggests_names
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.results import Stats

_NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class _Settings:
    """Checks of fields; errors name the class, the field and its value."""

    def _check(self, name: str, allowed: bool, wanted: str, *, is_type: bool = False) -> None:
        if not allowed:
            error = ArgumentTypeError if is_type else ArgumentError
            raise error(f"{type(self).__name__}({name}={getattr(self, name)!r}): {wanted}")

    def _check_whole(self, **least_of: int) -> None:
        for name, least in least_of.items():
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            self._check(
                name, is_whole and value >= least, f"must be a whole number, {least} or more"
            )

    def _check_seconds(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            checks.seconds(f"{type(self).__name__}({name}={value!r})", value)


@suggests_names
@dataclass(frozen=True)
class WeightSync(_Settings):
    """How new weights get to the workers.

    Attributes:
        backend: "gloo" or "nccl" for a broadcast to all; "auto": workers on the trainer's host map
            its memory, one worker of each other host gets a broadcast, and the others there map its
            memory. Where trainer and workers have GPUs, and NCCL can be used, the same holds for
            GPUs instead of hosts. Or the name of a backend that trainer and workers have registered
            with ``torch.distributed.Backend.register_backend``.
        wire_dtype: "bfloat16" or "float16": wider floats are sent in this dtype and converted back,
            which rounds them by at most 2**-9 of their value (bfloat16) or 2**-12 (float16, for
            magnitudes from 6.1e-5 to 65504; above that the push is refused). None: as they are.
        changes_only: send only the parameters and buffers that differ from the workers' version.
        exclude: patterns (``"critic.*"``) of names that are never sent.
        swap_within_rollouts: swap new weights in between any two steps; False: only between
            rollouts, so that each rollout is of one version.
        ready_timeout_s: a worker that isn't ready for weights after this many seconds is left out
            of the push; it gets the newest weights as soon as it answers.
    """

    backend: str = "auto"
    wire_dtype: str | None = None
    changes_only: bool = False
    exclude: Sequence[str] = ()
    swap_within_rollouts: bool = True
    ready_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        is_name = isinstance(self.backend, str)
        self._check(
            "backend",
            self.backend in ("auto", "gloo", "nccl")
            or (is_name and torch_backends.creator(self.backend) is not None),
            "use 'auto', 'gloo', 'nccl', or the name of a backend that is registered with "
            "torch.distributed.Backend.register_backend",
        )
        is_known = self.wire_dtype in (None, *_NARROW)
        self._check("wire_dtype", is_known, "use 'bfloat16', 'float16' or None")
        is_list = isinstance(self.exclude, Collection) and not isinstance(self.exclude, str)
        are_patterns = is_list and all(isinstance(pattern, str) for pattern in self.exclude)
        wanted = "must be a list of patterns, as ['critic.*']"
        self._check("exclude", are_patterns, wanted, is_type=True)
        self._check_seconds("ready_timeout_s")

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """``wire_dtype`` as torch's dtype."""
        return None if self.wire_dtype is None else _NARROW[self.wire_dtype]


@suggests_names
@dataclass(frozen=True)
class Staleness(_Settings):
    """How old the policy that chose a frame's action may be when the frame is delivered.

    A frame's lag is the number of versions newer than its own that were sent to its worker. Its age
    is the number of newer versions, whichever workers they were sent to. At least one is bounded.

    Attributes:
        max_policy_lag: the highest lag that is delivered, 0 or more; None: any.
        mode: "pace": no more rollouts are requested than can be delivered in time, judged by the
            number of batches that were recently taken between two publications; if a frame is too
            old nevertheless, as "drop". "drop": rollouts with a frame that is too old are dropped
            as a whole, before their data is moved. "mask": everything is delivered, and
            ``("collector", "mask")`` is False for frames that are too old.
        max_policy_age: the highest age that is delivered, 0 or more; None: any. A worker with older
            weights delivers nothing until you send it newer ones.
    """

    max_policy_lag: int | None = None
    mode: str = "pace"
    max_policy_age: int | None = None

    def __post_init__(self) -> None:
        bounds = ("max_policy_lag", "max_policy_age")
        given = [name for name in bounds if getattr(self, name) is not None]
        self._check(bounds[0], bool(given), "give max_policy_lag, max_policy_age, or both")
        self._check_whole(**dict.fromkeys(given, 0))
        self._check("mode", self.mode in ("pace", "drop", "mask"), "use 'pace', 'drop' or 'mask'")

    def slack(self, lag: int, age: int) -> int:
        """Return how many more versions a frame can take; below 0 it is too old."""
        if self.max_policy_lag is None:
            assert self.max_policy_age is not None
            return self.max_policy_age - age
        slack = self.max_policy_lag - lag
        return slack if self.max_policy_age is None else min(slack, self.max_policy_age - age)


@suggests_names
@dataclass(frozen=True)
class Faults(_Settings):
    """What counts as a failure, and how it is handled. Times are in seconds, at most 1e8.

    Attributes:
        start_timeout_s: limit for all workers to start and join, and for each to try out its envs.
        batch_timeout_s: limit for a batch, while you wait for it.
        weights_timeout_s: limit for workers to receive weights, and again to acknowledge them.
        stop_timeout_s: limit for workers to end by themselves at shutdown; then they are killed.
        leave_timeout_s: limit for a worker that leaves (released, or it got SIGTERM) to finish the
            rollout that it is collecting; frames of an unfinished rollout are lost.
        silence_timeout_s: a worker that does not answer for this long whether it lives (it was
            stopped, its host is unplugged or down) is lost. The end of a process is noticed at
            once. After the network stood still for 5 s, TCP may take 8 to go on.
        step_timeout_s: a worker that finishes no env step for this long, while it should collect or
            evaluate, is killed and replaced; None: no limit.
        max_restarts: how often in a row a worker's process is replaced; the count starts again
            after a process has worked for a minute. The first replacement comes at once, further
            ones after growing pauses.
        restart_pause_s: the longest of these pauses.
        min_workers: with fewer workers that collect, including those that are joining, the run ends
            with an error. If workers are in separate jobs (``distcollect submit --worker-jobs``),
            it waits for them instead, also at the start.
        missing_share: who collects a lost worker's share of a sync batch. "survivors": the other
            workers, as additional rollouts. "replacement": the batch waits for the worker's
            replacement.
        max_worker_bytes: a worker that uses more memory than this finishes its rollout and is
            replaced; None: no limit. Not an inference server.
        max_env_faults: an env that raises is closed and made again, and its trajectory ends at its
            last real frame, where ``("collector", "faulted")`` is True. After this many rebuilds in
            a row, without a whole episode or 1,000 frames in between, the next exception raises an
            :class:`~distcollect.EnvError`, and a worker in which it does is replaced. 0: the first
            exception ends the run.
    """

    start_timeout_s: float = 180.0
    batch_timeout_s: float = 600.0
    weights_timeout_s: float = 60.0
    stop_timeout_s: float = 4.0
    leave_timeout_s: float = 20.0
    silence_timeout_s: float = 10.0
    step_timeout_s: float | None = 300.0
    max_restarts: int = 10
    restart_pause_s: float = 30.0
    min_workers: int = 1
    missing_share: str = "survivors"
    max_worker_bytes: int | None = None
    max_env_faults: int = 3

    def __post_init__(self) -> None:
        least_of = {"max_restarts": 0, "max_env_faults": 0, "min_workers": 1, "max_worker_bytes": 1}
        given = {each.name for each in fields(self)}
        given -= {n for n in ("step_timeout_s", "max_worker_bytes") if getattr(self, n) is None}
        self._check_seconds(*(name for name in given if name.endswith("_s")))
        self._check_whole(**{name: least for name, least in least_of.items() if name in given})
        is_share = self.missing_share in ("survivors", "replacement")
        self._check("missing_share", is_share, "use 'survivors' or 'replacement'")


@suggests_names
@dataclass(frozen=True)
class Inference(_Settings):
    """Where the policy of the workers computes.

    Attributes:
        where: "worker": each worker has a copy of its own. "host": one process on each host, the
            inference server, has the only copy and computes the actions of all workers there. They
            hold no weights, and a push goes to the server alone. "rank": only the hosts of some
            ranks of the launch have a server; workers on other hosts ask one of these over the
            network, by connections that prove the run's token, and are encrypted where the
            trainer's are. "auto": "worker" or "host", by what a worker that is started for it
            measures: for each step of all envs, how long the policy takes. Where a server can't be
            used, it is "worker".
        batch_size: the most envs in a forward pass of a server; after ``set_seed`` each pass is
            padded to so many, so that results repeat. None: all envs of the run.
        num_threads: of a server on a CPU; None: one for each core of its host that the workers
            leave, at least one. If their envs sleep or wait, give it more.
        ranks: with "rank": these, from 1 (rank 0 is the trainer's). A rank has its worker too,
            worker ``rank - 1``.
    """

    where: str = "host"
    batch_size: int | None = None
    num_threads: int | None = None
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        places = ("worker", "host", "rank", "auto")
        self._check("where", self.where in places, "use 'worker', 'host', 'rank' or 'auto'")
        ranks = [] if isinstance(self.ranks, str) else [*self.ranks]
        are_ranks = all(isinstance(rank, int) and rank > 0 for rank in ranks)
        self._check(
            "ranks",
            are_ranks and bool(ranks) == (self.where == "rank"),
            "name ranks of the launch, from 1, with where='rank', and none without",
        )
        for name in ("batch_size", "num_threads"):
            if getattr(self, name) is not None:
                self._check_whole(**{name: 1})


@suggests_names
@dataclass(frozen=True)
class EvaluationWorkers(_Settings):
    """Workers that collect nothing, but evaluate the policy in the background.

    Each plays whole episodes in envs of its own with the newest weights that it has. Of the
    versions that it receives meanwhile, it evaluates only the last. The results are in the
    collector's ``evaluations``.

    Attributes:
        num_workers: how many of the collector's workers evaluate: those with the highest ids. Of a
            list of env makers they have the last ones, from which no frames are collected then.
        num_episodes: number of episodes that each plays with a version.
        deterministic: whether to take the most likely action, where the policy has a distribution.
        timeout_s: seconds for these episodes.
    """

    num_workers: int = 1
    num_episodes: int = 10
    deterministic: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._check_whole(num_workers=1, num_episodes=1)
        self._check_seconds("timeout_s")


@suggests_names
@dataclass(frozen=True)
class Normalize(_Settings):
    """Normalise observations and rewards by running statistics of all frames so far.

    The policy sees ``(observation - mean) / deviation``; the trainer updates the statistics from
    the batches, and publishes them with the weights. Rewards in batches are divided by the
    deviation of the discounted return. Frames with random actions count, padding doesn't. Returns
    of ``evaluate()`` and ``stats()`` are not normalised.

    Attributes:
        observations: True: the entries of floats in the observation space; or the names of entries
            (tuples for those of nested spaces), of any dtype; False: none.
        rewards: whether to scale rewards.
        gamma: discount factor of the returns that rewards are scaled by.
        clip: normalised values lie in [-clip, clip].
        epsilon: is added to each variance.
        record: what batches hold: "normalized", observations as the policy saw them and scaled
            rewards; or "raw", both as the env gave them. None: "raw" with a ``replay_buffer``, else
            "normalized".
    """

    observations: bool | Sequence[str | tuple[str, ...]] = True
    rewards: bool = True
    gamma: float = 0.99
    clip: float = 10.0
    epsilon: float = 1e-8
    record: str | None = None

    def __post_init__(self) -> None:
        is_list = isinstance(self.observations, Collection) and not isinstance(
            self.observations, str
        )
        wanted = "must be True, False or a list of names, such as ['observation']"
        is_choice = is_list or isinstance(self.observations, bool)
        self._check("observations", is_choice, wanted, is_type=True)
        for name in ("gamma", "clip", "epsilon"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self._check(name, is_number, "must be a number", is_type=True)
        self._check("gamma", 0 <= self.gamma <= 1, "must be from 0 to 1")
        self._check("clip", self.clip > 0, "must be above 0; float('inf') clips nothing")
        self._check("epsilon", self.epsilon > 0, "must be above 0")
        is_known = self.record in (None, "normalized", "raw")
        self._check("record", is_known, "use 'normalized', 'raw' or None")


@suggests_names
@dataclass(frozen=True)
class Monitor(_Settings):
    """How to show and record a run while it goes on; ``collector.stats()`` gives the same figures.

    Attributes:
        view: show how the run is going: on a terminal (standard error) in a display at the bottom,
            in a notebook below the cell, elsewhere in lines of the logger ``distcollect`` at level
            INFO. None: yes, unless the environment variable DISTCOLLECT_VIEW is 0.
        run_dir: a folder, made if needed. Every ``every_s`` a line of JSON is appended to
            ``stats.jsonl`` there, for ``distcollect top``, ``distcollect report`` and
            ``Stats.from_dict``; less often with hundreds of workers, whose lines are long. While
            another collector writes there, ``stats-2.jsonl`` is used, and so on.
        tensorboard: write TensorBoard events to ``run_dir`` as well: scalars by frames, in the
            groups collector, trainer_share, worker_share and metrics; needs tensorboard.
        prometheus_port: serve the newest figures to Prometheus at this port of 127.0.0.1, under
            ``/metrics``; 0: any free port, which is logged. Needs prometheus_client.
        callback: called with a :class:`~distcollect.Stats` every ``every_s`` and at the end, on a
            thread of its own. If it raises, that is logged, and it isn't called again.
        every_s: seconds between two lines, events or calls.
        trace: a file, overwritten, that records what every process does: Chrome trace events, for
            ui.perfetto.dev or chrome://tracing. It ends after a million events (about 100 MB). With
            several trainers each needs a file of its own.
        metrics: metrics of episodes, by name: the key of an entry of a batch that has one number
            per frame, such as ``{"success": ("next", "success")}`` with ``info_keys=["success"]``.
            An episode's value is that of its last frame. The means over the last hundred episodes
            are in ``Stats.episodes.metrics`` and ``WorkerStats.metrics``, and are shown and written
            wherever returns are. NaN: this episode does not count.
    """

    view: bool | None = None
    run_dir: str | os.PathLike[str] | None = None
    tensorboard: bool = False
    prometheus_port: int | None = None
    callback: Callable[[Stats], object] | None = None
    every_s: float = 5.0
    trace: str | os.PathLike[str] | None = None
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_number = isinstance(self.every_s, int | float)
        self._check("every_s", is_number and self.every_s > 0, "must be above 0 seconds")
        can_be_called = self.callback is None or callable(self.callback)
        self._check("callback", can_be_called, "must be callable", is_type=True)
        has_folder = not self.tensorboard or self.run_dir is not None
        self._check("tensorboard", has_folder, "say where, as in run_dir='runs/1'")
        are_keys = isinstance(self.metrics, Mapping) and all(
            isinstance(name, str) and name and isinstance(key, tuple) and key
            and all(isinstance(part, str) for part in key)
            for name, key in self.metrics.items()
        )  # fmt: skip
        wanted = "must be a dict from names to keys of a batch, such as "
        self._check("metrics", are_keys, wanted + "{'success': ('next', 'success')}", is_type=True)
        port = 0 if self.prometheus_port is None else self.prometheus_port
        is_whole = isinstance(port, int) and not isinstance(port, bool)
        self._check("prometheus_port", is_whole, "must be a whole number", is_type=True)
        self._check("prometheus_port", 0 <= port < 1 << 16, "must be from 0 to 65535")
        for name, what in (("run_dir", "a folder's path"), ("trace", "a file's path")):
            is_path = isinstance(getattr(self, name), str | os.PathLike | None)
            self._check(name, is_path, f"must be {what}", is_type=True)
        is_file = self.run_dir is not None and Path(self.run_dir).is_file()
        self._check("run_dir", not is_file, "is a file; name a folder, new or not")
