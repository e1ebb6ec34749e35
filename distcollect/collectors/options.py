"""The arguments of the collectors: their names, defaults, texts and checks, each written once.

Each collector takes one of these classes (see :mod:`.signature`): its fields are the collector's
arguments, and the text of each field is the text of the argument in ``help()``. To add an argument,
add a field and its text here.

A field that a class sets with ``init=False`` is fixed there, and can't be given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import gymnasium as gym
import torch
from torch import nn

from distcollect.collectors import pickling, validation
from distcollect.collectors.batch_format import BatchFormat, PostProcess
from distcollect.collectors.replay import ReplayBuffer, check_replay_buffer
from distcollect.collectors.validation import Devices
from distcollect.common import checks
from distcollect.config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from distcollect.engine.build import WorkerPlan
from distcollect.engine.engine import StepOptions
from distcollect.envs.make import is_env
from distcollect.errors import ArgumentError
from distcollect.launch.cpu_placement import num_cores
from distcollect.launch.worker_hosts import current
from distcollect.policy.base import Exploration
from distcollect.weights.broadcast import default_updater
from distcollect.weights.updaters import WeightUpdaterBase

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
Env: TypeAlias = "gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]"
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"


@dataclass(frozen=True, eq=False)
class CollectorOptions:
    """Arguments of every collector.

    Attributes:
        policy: TensorDictModule, module or callable from observation to action, to
            (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
            random actions. It always sees a leading dimension of envs.
        policy_factory: called to make the policy, instead of ``policy``.
        frames_per_batch: frames in each batch; a multiple of the number of envs.
        total_frames: the collector ends after this many frames, rounded up to whole batches; -1:
            it never ends.
        envs_per_worker: number of envs to make from one ``create_env_fn``.
        device: the default of the following three.
        storing_device: where batches are delivered; None: CPU.
        env_device: where TorchRL envs compute; other envs have no choice.
        policy_device: where the policy computes; None: where it is.
        max_frames_per_traj: truncate trajectories after this many frames; None: never.
        init_random_frames: the first frames, this many rounded up to whole rollouts, have
            random actions.
        reset_at_each_iter: start every rollout with a reset of all envs.
        postproc: called with each batch, in this process; what it returns is delivered.
        split_trajs: deliver ``[trajectories, longest]``, one row for each trajectory of the
            batch, padded with zeros; padding is False in ``("collector", "mask")``.
        trajs_per_batch: deliver this many whole trajectories at a time, in the order in which
            they end, padded as with ``split_trajs``; the last batch may have fewer.
        set_truncated: mark the last frame of each row of each rollout truncated and done,
            unless the episode terminated there.
        compact_obs: leave out the observations under "next", which halves the memory. They equal
            the next frame's, except at the end of an episode or row, where they are lost.
        replay_buffer: frames are added to it, ``[F]`` at a time, instead of being delivered to
            the loop over the collector.
        exploration_type: "random" or "deterministic" (or TorchRL's ``ExplorationType``), for
            policies with a distribution.
        info_keys: entries of ``info`` that the batch holds as if they were observations: a
            list of names, or ``{name: space}`` where the first reset and step don't show them.
        clip_actions: clip actions to the bounds of a Box space before the envs get them.
        models: further modules, by name, whose weights are published with the policy's.
        faults: what counts as a failure, and how it is handled.
        monitor: how to show and record the run while it goes on.
        trace: a file that records what every process does; see :class:`~distcollect.Monitor`.
    """

    create_env_fn: EnvMaker | Env | Sequence[Any]
    policy: Callable[..., Any] | None = None
    _: KW_ONLY
    policy_factory: Callable[[], Callable[..., Any]] | None = None
    frames_per_batch: int
    total_frames: int = -1
    envs_per_worker: int = 1
    device: torch.device | str | None = None
    storing_device: torch.device | str | None = None
    env_device: torch.device | str | None = None
    policy_device: torch.device | str | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    postproc: PostProcess | None = None
    split_trajs: bool | None = None
    trajs_per_batch: int | None = None
    set_truncated: bool = False
    compact_obs: bool = False
    replay_buffer: ReplayBuffer | None = None
    exploration_type: object = Exploration.RANDOM
    info_keys: InfoKeys = None
    clip_actions: bool = False
    models: Mapping[str, nn.Module] | None = None
    faults: Faults | None = None
    monitor: Monitor | None = None
    trace: str | os.PathLike[str] | None = None

    # Rollouts of a single env have no row dimension in TorchRL's collectors for one host.
    squeeze: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check everything that can be checked without an env.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
        """
        validation.check_kinds(self)
        checks.positive("frames_per_batch", self.frames_per_batch)
        validation.check_total_frames(self.total_frames, self.frames_per_batch)
        check_replay_buffer(self.replay_buffer)
        checks.positive("envs_per_worker", self.envs_per_worker)
        validation.check_policy(self.policy, self.policy_factory)
        validation.check_random_frames(self.init_random_frames)
        checks.positive("max_frames_per_traj", self.max_frames_per_traj, optional=True)
        # These check what they are made from.
        _ = self.batch_format, self.devices, self.exploration, self.named_models

    @cached_property
    def batch_format(self) -> BatchFormat:
        """How a batch looks."""
        return BatchFormat(
            cat_results=self._cat_results,
            squeeze=self.squeeze,
            set_truncated=self.set_truncated,
            split_trajs=bool(self.split_trajs),
            trajs_per_batch=self.trajs_per_batch,
            postproc=self.postproc,
        )

    @property
    def _cat_results(self) -> int | str | None:
        return 0

    @property
    def rounded_total_frames(self) -> int:
        """``total_frames`` rounded up to whole batches; -1: no limit."""
        if self.total_frames == -1:
            return -1
        return -(-self.total_frames // self.frames_per_batch) * self.frames_per_batch

    @cached_property
    def exploration(self) -> Exploration:
        """``exploration_type``, as the policy takes it."""
        return Exploration.of(self.exploration_type)

    @cached_property
    def devices(self) -> Devices:
        """The three devices, with ``device`` as their default."""
        return validation.devices(
            self.device, self.storing_device, self.env_device, self.policy_device
        )

    @cached_property
    def named_models(self) -> dict[str, nn.Module]:
        """``models``; empty for None."""
        return validation.named_models(self.models)

    @property
    def random_frames(self) -> int:
        """``init_random_frames``; 0 for None."""
        return self.init_random_frames or 0

    @property
    def fault_limits(self) -> Faults:
        """``faults``, or its defaults."""
        return self.faults or Faults()

    @property
    def step_options(self) -> StepOptions:
        """How the engine steps the envs."""
        return StepOptions(self.max_frames_per_traj, self.reset_at_each_iter, self.clip_actions)

    def plan(self, *, num_envs: int, traces: bool) -> WorkerPlan:
        """What the engine is built from, with the policy and the env makers as they were given.

        Args:
            num_envs: number of envs.
            traces: whether the engine records what it does when.
        """
        return WorkerPlan(
            create_env_fn=self.create_env_fn,
            num_envs=num_envs,
            policy=self.policy,
            policy_factory=self.policy_factory,
            device=self.devices.policy,
            env_device=self.devices.env,
            exploration=self.exploration,
            info_keys=self.info_keys,
            options=self.step_options,
            models=self.named_models,
            max_env_faults=self.fault_limits.max_env_faults,
            traces=traces,
        )


@dataclass(frozen=True, eq=False)
class SyncOptions(CollectorOptions):
    """Arguments of :class:`~distcollect.SyncDataCollector`.

    Attributes:
        create_env_fn: an env id; a callable that makes a ``gymnasium.Env`` or ``VectorEnv``, a
            TorchRL ``EnvBase`` or a PettingZoo ``ParallelEnv``; an env itself; or a list of
            these, one env each. A callable with a parameter named ``context`` gets an
            :class:`~distcollect.EnvContext`.
        init_random_frames: this many frames at the start have random actions.
        reset_at_each_iter: start every batch with a reset of all envs.
        set_truncated: mark the last frame of each row truncated and done, unless the episode
            terminated there.
        faults: how often an env may raise; the timeouts concern workers only.
        trace: a file that records what the process does; see :class:`~distcollect.Monitor`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for maker in self.makers:
            validation.check_env_maker(maker, instances=True)

    @property
    def makers(self) -> list[Any]:
        """What was given to make envs from, or as envs."""
        given = self.create_env_fn
        return given if isinstance(given, list) else [given]

    @property
    def has_env_instances(self) -> bool:
        """Whether an env itself was given."""
        return any(is_env(maker) for maker in self.makers)

    @property
    def num_envs(self) -> int:
        """Number of envs; a vector env counts as one."""
        return len(self.makers) if isinstance(self.create_env_fn, list) else self.envs_per_worker


@dataclass(frozen=True, eq=False)
class WorkerOptions(CollectorOptions):
    """Arguments of every collector that has workers.

    Attributes:
        create_env_fn: an env id; a callable that makes a ``gymnasium.Env`` or ``VectorEnv``, a
            TorchRL ``EnvBase`` or a PettingZoo ``ParallelEnv``; or a list of these, one for
            each worker (a worker that joins later gets the one at its worker_id modulo the
            length of the list). A callable with a parameter named ``context`` gets an
            :class:`~distcollect.EnvContext`.
        policy: TensorDictModule, module or callable from observation to action, to
            (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
            random actions. It always sees a leading dimension of envs. It is copied to the
            workers now; :meth:`update_policy_weights_` sends newer weights.
        policy_factory: called on each worker to make the policy, instead of ``policy``.
        frames_per_batch: frames in each batch; in sync mode a multiple of all envs of all
            workers, in async mode of one worker's envs.
        num_workers: number of workers; None: one for each maker in a list, else one for each core
            of this host.
        envs_per_worker: number of envs that each worker steps.
        policy_device: where the workers' policies compute; None: where the policy is.
        models: further modules, by name, that are published with the policy as one version: an
            observation normalizer, an encoder inside the envs. Policy and env makers that
            refer to them refer to the workers' copies there.
        cat_results: shape of a sync batch: 0 for ``[W * n, T]``, "stack" for ``[W, n, T]``, -1
            for ``[n, W * T]``.
        preemptive_threshold: in sync mode, once this share of a batch's rollouts is there
            (above 0, at most 1), the other workers are told to deliver what they have. The
            missing frames are padding: False in ``("collector", "mask")``.
        batch_deadline_s: in sync mode, the same, this many seconds after a batch was requested.
        update_at_each_batch: publish the policy's weights automatically between two batches: in
            sync mode to all workers, in async mode to the one that delivered the last batch.
        max_weight_update_interval: ``update_at_each_batch`` also sends to workers that are more
            than this many versions behind; ``worker_ids="lagging"`` means these.
        weight_sync: what is sent, and when the workers use it.
        weight_updater: how weights are sent; None: an :class:`AutoUpdater`, or if
            ``weight_sync`` names a backend a :class:`BroadcastUpdater`.
        staleness: how old the policy of a delivered frame may be; None: any age.
        reproducible: in async mode, the same batches each time (after ``set_seed``). Workers
            deliver in turn. Each begins a rollout when the batch after its previous one is
            requested, with the weights published by then, and keeps these weights to the end. So a
            frame's lag is the number of publications meanwhile: one less than there are
            workers, if each batch is followed by one. Once a worker dies, batches differ.
        evaluation: how many of the workers evaluate the policy instead of collecting.
    """

    create_env_fn: EnvMaker | Sequence[EnvMaker] = field(kw_only=False)
    _: KW_ONLY
    num_workers: int | None = None
    sync: bool = field(default=False, init=False)
    cat_results: int | str | None = 0
    preemptive_threshold: float | None = None
    batch_deadline_s: float | None = None
    update_at_each_batch: bool = False
    max_weight_update_interval: int | None = None
    weight_sync: WeightSync | None = None
    weight_updater: WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None = None
    staleness: Staleness | None = None
    reproducible: bool = False
    evaluation: EvaluationWorkers | None = None
    listen: str | None = field(default=None, init=False)

    # Whether the workers are on this host, whatever the launch provides.
    is_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("num_workers", self.num_workers, optional=True)
        if self._cat_results != 0 and not self.sync:
            raise ArgumentError(
                f"cat_results={self.cat_results!r} is for sync=True: without it a batch is one "
                "rollout"
            )
        if self.reproducible and self.staleness is not None and self.mask_above is None:
            raise ArgumentError(
                f"reproducible=True and {self.staleness}: the lag is fixed then; mode='mask' works"
            )
        checks.positive(
            "max_weight_update_interval", self.max_weight_update_interval, optional=True
        )
        validation.check_stragglers(
            self.preemptive_threshold, self.batch_deadline_s, sync=self.sync
        )
        self.num_steps(self.envs_per_worker)
        # These check what they are made from.
        _ = self.num_collecting, self.updater, self.makers

    @property
    def _cat_results(self) -> int | str | None:
        return self.cat_results

    @cached_property
    def num_to_start(self) -> int:
        """Number of workers to start with.

        Raises:
            ArgumentError: the launch has fewer.
        """
        launched = None if self.is_local else current()
        if launched is not None:
            return launched.num_workers(self.num_workers)
        if self.num_workers is None and isinstance(self.create_env_fn, list | tuple):
            return len(self.create_env_fn)
        return self.num_workers or num_cores()

    @cached_property
    def num_collecting(self) -> int:
        """Number of workers that collect; those with higher ids evaluate."""
        return validation.num_collecting(self.num_to_start, self.evaluation)

    @property
    def evaluating(self) -> range:
        """The ids of the workers that evaluate."""
        return range(self.num_collecting, self.num_to_start)

    @property
    def rollouts_per_batch(self) -> int:
        """Number of rollouts in a batch: one of each worker in sync mode, else one."""
        return self.num_collecting if self.sync else 1

    def num_steps(self, num_envs: int) -> int:
        """T of each rollout, if each worker has ``num_envs`` envs.

        Raises:
            ArgumentError: ``frames_per_batch`` is no multiple; says which numbers are.
        """
        return validation.num_steps(self.frames_per_batch, self.rollouts_per_batch, num_envs)

    @cached_property
    def makers(self) -> list[object]:
        """One env maker for each worker, by worker_id."""
        return validation.env_makers(self.create_env_fn, self.num_to_start)

    @property
    def weight_options(self) -> WeightSync:
        """``weight_sync``, or its defaults."""
        return self.weight_sync or WeightSync()

    @cached_property
    def updater(self) -> WeightUpdaterBase:
        """What moves the weights; the same object each time."""
        given = validation.made_updater(self.weight_updater)
        return given or default_updater(self.weight_options.backend)

    @property
    def mask_above(self) -> int | None:
        """Frames with a higher lag, in versions, are masked; None: none are."""
        masks = self.staleness is not None and self.staleness.mode == "mask"
        return self.staleness.max_policy_lag if self.staleness is not None and masks else None

    @property
    def has_mask(self) -> bool:
        """Whether a batch can hold padding or masked frames."""
        limits = (self.mask_above, self.preemptive_threshold, self.batch_deadline_s)
        return any(limit is not None for limit in limits)

    @property
    def step_options(self) -> StepOptions:
        """How the engine steps the envs."""
        return StepOptions(
            self.max_frames_per_traj,
            self.reset_at_each_iter,
            self.clip_actions,
            swap_within_rollouts=self.weight_options.swap_within_rollouts and not self.reproducible,
            exact_version=self.reproducible,
        )

    def pickled_plans(self, *, traces: bool) -> list[bytes]:
        """The pickled :class:`WorkerPlan` of each worker, by worker_id.

        Args:
            traces: whether the workers record what they do when.

        Raises:
            PolicyNotSendable: the policy can't be pickled.
            ArgumentError: another argument can't be pickled.
        """
        plan = self.plan(num_envs=self.envs_per_worker, traces=traces)
        plan = replace(plan, exclude=tuple(self.weight_options.exclude))
        return pickling.pickled_plans(plan, self.makers)


@dataclass(frozen=True, eq=False)
class MultiSyncOptions(WorkerOptions):
    """Arguments of :class:`~distcollect.MultiSyncDataCollector`.

    Attributes:
        frames_per_batch: frames in each batch; a multiple of all envs of all workers.
        cat_results: how the workers' rollouts are joined, see the table above; None: "stack".
        update_at_each_batch: publish the policy's weights automatically between two batches.
    """

    _: KW_ONLY
    sync: bool = field(default=True, init=False)
    cat_results: int | str | None = "stack"

    @property
    def _cat_results(self) -> int | str | None:
        return "stack" if self.cat_results is None else self.cat_results


@dataclass(frozen=True, eq=False)
class MultiAsyncOptions(WorkerOptions):
    """Arguments of :class:`~distcollect.MultiaSyncDataCollector`.

    Attributes:
        frames_per_batch: frames in each batch; a multiple of one worker's envs.
        update_at_each_batch: publish the policy's weights automatically between two batches, to
            the worker that delivered the last one.
    """


@dataclass(frozen=True, eq=False)
class AsyncOptions(MultiAsyncOptions):
    """Arguments of :class:`~distcollect.aSyncDataCollector`.

    Attributes:
        create_env_fn: an env id, or a callable that makes a ``gymnasium.Env`` or ``VectorEnv``, a
            TorchRL ``EnvBase`` or a PettingZoo ``ParallelEnv``. A callable with a parameter named
            ``context`` gets an :class:`~distcollect.EnvContext`.
        frames_per_batch: frames in each batch; a multiple of the number of envs.
    """

    create_env_fn: EnvMaker = field(kw_only=False)
    _: KW_ONLY
    num_workers: int | None = field(default=1, init=False)


@dataclass(frozen=True, eq=False)
class RPCOptions(WorkerOptions):
    """Arguments of :class:`~distcollect.RPCDataCollector`.

    Attributes:
        num_workers: number of workers; None: all that the launch provides; without a launch, one
            for each maker in a list, else one for each core of this host.
        sync: True: a batch ``[W * n, T]`` is one rollout from each worker, rows in the order of
            worker_id; workers collect it when it is requested. False: a batch ``[n, T]`` is one
            rollout from whichever worker is done first; the others keep collecting.
        listen: "HOST:PORT" of this host, where ``distcollect worker --join`` can add workers
            at any time; None: the value of DISTCOLLECT_LISTEN, else nowhere. Under a launcher, set
            DISTCOLLECT_LISTEN instead.
    """

    _: KW_ONLY
    sync: bool = False
    listen: str | None = None

    squeeze: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
