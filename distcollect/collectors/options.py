"""The arguments of the collectors: their names, defaults, texts and checks, each written once.

Each collector takes one of the classes here (see :mod:`.signature`):
the fields are the collector's arguments, and the text of each field is the text of the argument in
``help()``. To add an argument, add a field and its text.

A field that a class sets with ``init=False`` is fixed there, and can't be given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors import pickling, serving, validation
from distcollect.collectors.replay import ReplayBuffer
from distcollect.collectors.user_code import users_stack_level
from distcollect.collectors.validation import Devices
from distcollect.common.tables import counted
from distcollect.config import (
    EvaluationWorkers,
    Faults,
    Inference,
    Monitor,
    Normalize,
    Staleness,
    WeightSync,
)
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.kinds import is_env
from distcollect.errors import ArgumentError
from distcollect.integrations import load
from distcollect.launch.cpu_placement import num_cores
from distcollect.launch.open_hosts import current
from distcollect.launch.rendezvous import LISTEN
from distcollect.net.tls import check_security
from distcollect.policy.base import Exploration
from distcollect.policy.normalize import Normalizer
from distcollect.policy.weight_layout import STATISTICS, module_of, uncompiled
from distcollect.transport import start
from distcollect.weights.updaters import WeightUpdaterBase

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
Env: TypeAlias = "gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]"
Device: TypeAlias = "torch.device | str | Sequence[torch.device | str | None] | None"
PolicyFactory: TypeAlias = Callable[[], Callable[..., Any]]
PostProcess: TypeAlias = Callable[[TensorDict], Any]
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"


@dataclass(frozen=True, eq=False)
class CollectorOptions:
    """Arguments of every collector.

    Attributes:
        policy: TensorDictModule, module or callable from observation to action, to
            (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
            random actions. It sees a leading dimension of envs; with a TorchRL env it sees what
            TorchRL shows it.
        policy_factory: called to make the policy. With a ``policy`` too, the policy that is made
            gets the weights of ``policy``.
        frames_per_batch: frames in each batch; a multiple of the number of envs.
        total_frames: the collector ends after this many frames, rounded up to whole batches; -1:
            it never ends.
        envs_per_worker: number of envs to make from one ``create_env_fn``.
        device: the default of the following three.
        storing_device: where batches are delivered; None: CPU.
        env_device: where TorchRL envs compute; other envs have no choice.
        policy_device: where the policy computes; None: where it is.
        max_frames_per_traj: truncate trajectories after this many frames; None: never.
        init_random_frames: the first frames, this many rounded up to whole rollouts (in sync mode
            to whole batches), have random actions.
        reset_at_each_iter: start every rollout with a reset of all envs.
        postproc: called with each batch, in this process; what it returns is delivered. With a
            ``replay_buffer`` it may drop the mask; if it drops frames too, padding among them.
        split_trajs: deliver ``[trajectories, longest]``, one row for each trajectory of the
            batch, padded with zeros; padding is False in ``("collector", "mask")``.
        trajs_per_batch: deliver exactly this many whole trajectories at a time, in the order in
            which they end, padded as with ``split_trajs``. At the end, fewer are dropped, and so
            is what a fault of its env has cut short. A ``replay_buffer`` gets all that are whole,
            as soon as there is one.
        traj_format: how ``trajs_per_batch`` delivers trajectories: "padded", or "cat": one after
            the other, ``[F]``, without padding.
        set_truncated: mark the last frame of each row of each rollout truncated and done,
            unless the episode terminated there; with TorchRL's envs in any case.
        pre_collect_hook: called without arguments before each rollout, in the process that steps
            the envs.
        post_collect_hook: called with each rollout, in the process that steps the envs: with the
            batch itself in this process, with a copy in a worker. Its result is ignored.
        track_policy_version: frames have their policy_version as ``"policy_version"`` too, at the
            root and under "next", where TorchRL has it.
        track_traj_ids: False: batches have nothing under "collector" but the mask, if there is
            padding.
        compact_obs: leave out the observations under "next", which halves the memory. They equal
            the next frame's, except at the end of an episode or row, where they are lost.
        replay_buffer: frames are added to it, ``[F]`` at a time, instead of being delivered to
            the loop over the collector.
        extend_buffer: True: an entry of the replay buffer is one frame. False: it is one step of
            all envs of a worker, ``[n]``, where a worker has several.
        exploration_type: "random", "deterministic", "mode", "mean" or "median" (or TorchRL's
            ``ExplorationType``), for policies with a distribution.
        info_keys: entries of ``info`` that the batch holds as if they were observations: a
            list of names, or ``{name: space}`` where the first reset and step don't show them.
        clip_actions: clip actions to the bounds of a Box space before the envs get them.
        check_nan: raise ``EnvError`` if an observation or a reward is NaN or infinite, at the end
            of the rollout, instead of delivering it; not for TorchRL's envs, for which TorchRL has
            the transform ``FiniteTensorDictCheck``.
        auto_register_policy_transforms: None, True: TorchRL envs get the transforms that a
            recurrent policy of TorchRL needs and they lack. False: they stay as they are.
        models: further modules, by name, whose weights are published with the policy's.
        normalize: the policy sees normalised observations, and batches hold these and scaled
            rewards. With workers, new statistics come with :meth:`update_policy_weights_`.
        faults: what counts as a failure, and how it is handled.
        monitor: how to show and record the run while it goes on.
        trace: a file that records what every process does; see :class:`~distcollect.Monitor`.
    """

    create_env_fn: EnvMaker | Env | Sequence[Any]
    policy: Callable[..., Any] | None = None
    _: KW_ONLY
    policy_factory: PolicyFactory | Sequence[PolicyFactory] | None = None
    frames_per_batch: int
    total_frames: int = -1
    envs_per_worker: int = 1
    device: Device = None
    storing_device: Device = None
    env_device: Device = None
    policy_device: Device = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    postproc: PostProcess | None = None
    split_trajs: bool | None = None
    trajs_per_batch: int | None = None
    traj_format: str | None = None
    set_truncated: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[TensorDict], Any] | None = None
    track_policy_version: bool = False
    track_traj_ids: bool = True
    compact_obs: bool = False
    replay_buffer: ReplayBuffer | None = None
    extend_buffer: bool = True
    exploration_type: object = Exploration.RANDOM
    info_keys: InfoKeys = None
    clip_actions: bool = False
    check_nan: bool = True
    auto_register_policy_transforms: bool | None = None
    models: Mapping[str, nn.Module] | None = None
    normalize: Normalize | None = None
    faults: Faults | None = None
    monitor: Monitor | None = None
    trace: str | os.PathLike[str] | None = None

    # Rollouts of a single env have no row dimension in TorchRL's collectors for one host.
    squeeze: ClassVar[bool] = True
    has_workers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check everything that can be checked without an env.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
        """
        validation.check_each(self)
        total = self.rounded_total_frames(self.frames_per_batch)
        if total != self.total_frames:
            warnings.warn(
                f"total_frames={self.total_frames} is no multiple of frames_per_batch="
                f"{self.frames_per_batch}: {total} frames will be collected",
                stacklevel=users_stack_level(),
            )
        validation.check_policy(self.policy, self.policy_factory, several=self.has_workers)
        validation.check_together(self)
        # These check what they are made from.
        _ = self.devices, self.named_models
        Exploration.of(self.exploration_type)

    @property
    def joins(self) -> int | str:
        """Where the rollouts of a batch are joined.

        0: along their first dimension, -1: along time, "stack": along a new first dimension.
        """
        return 0

    def rounded_total_frames(self, frames_per_batch: int) -> int:
        """``total_frames`` rounded up to whole batches; -1: no limit."""
        if self.total_frames == -1:
            return -1
        return -(-self.total_frames // frames_per_batch) * frames_per_batch

    @property
    def num_to_start(self) -> int:
        """Number of workers to start with; 1 without workers."""
        return 1

    @property
    def placer(self) -> Any:
        """The settings of another scheduler that starts the workers; None: none does."""
        return None

    @cached_property
    def worker_devices(self) -> list[Devices]:
        """The devices of each worker, by worker_id; without workers, those of this process."""
        return validation.worker_devices(self, self.num_to_start, elsewhere=self.placer is not None)

    @property
    def devices(self) -> Devices:
        """The devices of the first worker; batches are delivered on one device for all."""
        return self.worker_devices[0]

    @cached_property
    def named_models(self) -> dict[str, nn.Module]:
        """``models``; empty for None."""
        return validation.named_models(self.models)

    @cached_property
    def normalizer(self) -> Normalizer | None:
        """What the policy's observations go through; None: nothing. The same object each time."""
        return None if self.normalize is None else Normalizer(self.normalize)

    @property
    def published_models(self) -> dict[str, nn.Module]:
        """All that is published beside the policy: ``models``, and the :attr:`normalizer`."""
        own = {} if self.normalizer is None else {STATISTICS: self.normalizer}
        return {**self.named_models, **own}

    @property
    def records_raw(self) -> bool:
        """True if batches hold what the envs gave, whatever the policy saw."""
        record = None if self.normalize is None else self.normalize.record
        return record == "raw" or (record is None and self.replay_buffer is not None)

    @property
    def rollouts_per_batch(self) -> int:
        """Number of rollouts in a batch."""
        return 1

    @property
    def has_mask(self) -> bool:
        """True if a batch can hold masked frames, or padding that is not from ``split_trajs``."""
        return False

    @property
    def num_envs(self) -> int:
        """Number of envs to make in each process that steps envs."""
        return self.envs_per_worker

    @property
    def random_frames(self) -> int:
        """``init_random_frames``; 0 for None."""
        return self.init_random_frames or 0

    @cached_property
    def fault_limits(self) -> Faults:
        """``faults``, or its defaults."""
        return self.faults or Faults()

    @cached_property
    def factories(self) -> list[PolicyFactory]:
        """``policy_factory`` as a list: one for all workers or one for each; empty for None.

        With a ``policy`` too, what they make begins with its weights.
        """
        given: Any = self.policy_factory
        factories = list(given) if isinstance(given, list | tuple) else [given] if given else []
        module = module_of(self.policy)
        if not factories or module is None:
            return factories
        weights = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in module.state_dict().items()
        }
        return [partial(_with_weights, factory, weights) for factory in factories]

    @property
    def trace_path(self) -> str | os.PathLike[str] | None:
        """The file that records what every process does; None: there is none."""
        return self.trace if self.trace is not None or not self.monitor else self.monitor.trace

    def plan(self, worker_id: int = 0) -> WorkerPlan:
        """Make the plan of an engine, with the policy and the env makers as they were given.

        ``worker_id``: of the worker that has the engine; 0 without workers.
        """
        devices, factories = self.worker_devices[worker_id], self.factories
        return WorkerPlan(
            create_env_fn=self.create_env_fn,
            num_envs=self.num_envs,
            policy=None if factories else self.policy,
            policy_factory=factories[worker_id % len(factories)] if factories else None,
            device=devices.policy,
            env_device=devices.env,
            adds_transforms=self.auto_register_policy_transforms is not False,
            exploration=Exploration.of(self.exploration_type),
            info_keys=self.info_keys,
            max_frames_per_traj=self.max_frames_per_traj,
            reset_at_each_iter=self.reset_at_each_iter,
            clip_actions=self.clip_actions,
            check_nan=self.check_nan,
            models=self.published_models,
            max_env_faults=self.fault_limits.max_env_faults,
            traces=self.trace_path is not None,
            metrics=self.monitor.metrics if self.monitor is not None else {},
        )


def _with_weights(factory: Callable[[], Any], weights: dict[str, torch.Tensor]) -> Any:
    """The policy that ``factory`` makes, with ``weights``."""
    policy = factory()
    module = module_of(policy)
    if module is None:
        policy.load_state_dict(weights)
        return policy
    own = {uncompiled(name): name for name in module.state_dict()}
    module.load_state_dict(
        {own.get(uncompiled(name), name): value for name, value in weights.items()}
    )
    return policy


@dataclass(frozen=True, eq=False)
class SyncOptions(CollectorOptions):
    """Arguments of :class:`~distcollect.SyncDataCollector`.

    Attributes:
        create_env_fn: an env id; a callable that makes a ``gymnasium.Env`` or ``VectorEnv``, a
            TorchRL ``EnvBase`` or a PettingZoo ``ParallelEnv``; an env itself; or a list of
            these, one env each. A callable with a parameter named ``context`` gets an
            :class:`~distcollect.EnvContext`.
        reset_at_each_iter: start every batch with a reset of all envs.
        set_truncated: mark the last frame of each row truncated and done, unless the episode
            terminated there; with TorchRL's envs in any case.
        faults: how often an env may raise; the timeouts concern workers only.
        trace: a file that records what the process does; see :class:`~distcollect.Monitor`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for maker in self.makers:
            validation.check_env_maker(maker, instances=True)

    @property
    def makers(self) -> list[Any]:
        """Env makers and envs, as they were given."""
        given = self.create_env_fn
        return given if isinstance(given, list) else [given]

    @property
    def worker_id(self) -> int:
        """The ``worker_id`` in the context that env makers get."""
        return 0

    @property
    def has_env_instances(self) -> bool:
        """True if an env itself was given."""
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
        policy_factory: called on each worker to make the policy. With a ``policy`` too, the
            workers' policies begin with its weights, and it is the one to publish. A list has one
            for each worker; their policies must have weights of the same names and shapes.
        init_fn: called on each worker before anything else is made there.
        frames_per_batch: frames in each batch; in sync mode a multiple of all envs of all
            workers, in async mode of one worker's envs.
        num_workers: number of workers; None: one for each maker in a list, else one for each core
            of this host.
        envs_per_worker: number of envs that each worker steps.
        device: the default of the following three. A list, here and there, has one device for
            each worker.
        policy_device: where the workers' policies compute; None: on the kind of device where the
            policy is now, so a policy on a GPU needs a GPU on each worker's host.
        models: further modules, by name, that are published with the policy as one version: an
            observation normalizer, an encoder inside the envs. Policy and env makers that
            refer to them refer to the workers' copies there.
        cat_results: shape of a sync batch: 0 for ``[W * n, T]``, "stack" for ``[W, n, T]``, -1
            for ``[n, W * T]``.
        preemptive_threshold: in sync mode, once this share of a batch's rollouts is there (from 0,
            the first one, to 1), the other workers are told to deliver what they have. The
            missing frames are padding: False in ``("collector", "mask")``. With ``cat_results=-1``
            they are left out.
        batch_deadline_s: in sync mode, the same, this many seconds after a batch was requested.
        update_at_each_batch: publish the policy's weights automatically between two batches: in
            sync mode to all workers, in async mode to the one that delivered the last batch, and to
            the evaluation workers.
        max_weight_update_interval: ``update_at_each_batch`` also sends to workers that are more
            than this many versions behind; ``worker_ids="lagging"`` means these.
        weight_sync: what is sent, and when the workers use it.
        weight_updater: how weights are sent: a :class:`WeightUpdaterBase` of ours or of TorchRL's,
            or a callable that makes one; None: an :class:`AutoUpdater`, or if ``weight_sync`` names
            a backend a :class:`BroadcastUpdater`.
        staleness: how old the policy of a delivered frame may be; None: any age. Not with
            ``trajs_per_batch``.
        reproducible: in async mode, the same batches each time (after ``set_seed``). Workers
            deliver in turn. Each begins a rollout when the batch after its previous one is
            requested, with the weights published by then, and keeps these weights to the end. So a
            frame's lag is the number of publications meanwhile: one less than there are
            workers, if each batch is followed by one. Once a worker dies, batches differ.
        evaluation: how many of the workers evaluate the policy instead of collecting.
        inference: where the policy computes; None: each worker has a copy of its own.
        transport: by what the workers are called: "rpc", torch's RPC, or "tcp", the connections by
            which they join; None: what DISTCOLLECT_TRANSPORT says, else "tcp" where all
            workers are local and for :class:`~distcollect.DistributedDataCollector`, and "rpc" for
            the others.
    """

    create_env_fn: EnvMaker | Sequence[EnvMaker] = field(kw_only=False)
    _: KW_ONLY
    num_workers: int | None = None
    init_fn: Callable[[], Any] | None = None
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
    inference: Inference | None = None
    transport: str | None = None
    listen: str | None = field(default=None, init=False)
    security: str | None = field(default=None, init=False)

    has_workers: ClassVar[bool] = True
    # Whether the workers are on this host, whatever the launch provides.
    is_local: ClassVar[bool] = True
    default_transport: ClassVar[str] = start.TCP  # for local workers, nothing listens then

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joins != 0 and not self.sync:
            raise ArgumentError(
                f"cat_results={self.joins!r} is for sync=True: without it a batch is one rollout"
            )
        if (bound := self.staleness) is not None and self.masked_bound is None:
            if self.reproducible:
                raise ArgumentError(
                    f"reproducible=True and {bound}: the lag is fixed then; mode='mask' works"
                )
            if self.sync and bound.max_policy_age is not None:
                raise ArgumentError(
                    f"sync=True and {bound}: a batch has frames of all workers, also of those that "
                    "got no newer weights; mode='mask' works"
                )
        for name in ("preemptive_threshold", "batch_deadline_s"):
            if not self.sync and (value := getattr(self, name)) is not None:
                raise ArgumentError(
                    f"{name}={value!r} is for sync=True: without it no batch waits for a slow "
                    "worker"
                )
        # These check what they are made from.
        _ = self.num_collecting, self.updater, self.transport_name
        self._check_least()
        validation.check_excluded(self.weight_options.exclude, self.policy, self.named_models)
        if self.inference is not None and self.inference.where in ("host", "rank"):
            serving.check(self)
        if not load("rounding of frames")(self.makers):
            validation.num_steps(self, self.envs_per_worker)
        if len(self.factories) not in (0, 1, self.num_to_start):
            raise ArgumentError(
                f"policy_factory has {len(self.factories)} factories for "
                f"{counted(self.num_to_start, 'worker')}: a list has one for each worker"
            )

    @property
    def joins(self) -> int | str:
        default: Any = type(self).cat_results
        return default if self.cat_results is None else self.cat_results

    @cached_property
    def num_to_start(self) -> int:
        """Number of workers to start with.

        Raises:
            ArgumentError: the launch has fewer.
        """
        launched = None if self.is_local or self.placer is not None else current()
        if launched is not None:
            return launched.num_workers(self.num_workers)
        if self.num_workers is None and isinstance(self.create_env_fn, list | tuple):
            return len(self.create_env_fn)
        return self.num_workers or self._most_workers()

    def _most_workers(self) -> int:
        """Number of workers where neither the user nor a launch says it."""
        return num_cores() if self.placer is None else load("ray job").num_workers()

    @cached_property
    def num_collecting(self) -> int:
        """Number of workers that collect; those with higher ids evaluate.

        Raises:
            ArgumentError: there are none.
        """
        num_evaluating = self.evaluation.num_workers if self.evaluation else 0
        if num_evaluating >= self.num_to_start:
            raise ArgumentError(
                f"EvaluationWorkers(num_workers={num_evaluating}): of {self.num_to_start} "
                "worker(s), at least one has to collect"
            )
        return self.num_to_start - num_evaluating

    @property
    def is_open(self) -> bool:
        """Return True if workers on other hosts may be there, or join later."""
        given = self.listen or os.environ.get(LISTEN) or self.placer is not None or current()
        return not self.is_local and bool(given)

    def _check_least(self) -> None:
        """Refuse ``Faults(min_workers=)`` above the workers that collect, if none can join later.

        Raises:
            ArgumentError: it is above them.
        """
        least = self.fault_limits.min_workers
        if least > self.num_collecting and not self.is_open:
            raise ArgumentError(
                f"Faults(min_workers={least}): only {counted(self.num_collecting, 'worker')} will "
                "collect, and no more can join"
            )

    @property
    def evaluating(self) -> range:
        """The ids of the workers that evaluate."""
        return range(self.num_collecting, self.num_to_start)

    @property
    def has_servers(self) -> bool:
        """True if workers ask inference servers."""
        return self.chosen_inference[0] in ("host", "rank")

    @property
    def server_ranks(self) -> tuple[int, ...] | None:
        """The ranks whose hosts have inference servers; empty: all hosts. None: there are none."""
        return tuple(self.inference.ranks) if self.inference and self.has_servers else None

    @cached_property
    def chosen_inference(self) -> tuple[str, str]:
        """Where the policy computes, and why if that was measured; the first call may do it."""
        return serving.chosen(self)

    @property
    def rollouts_per_batch(self) -> int:
        """Number of rollouts in a batch: one of each worker in sync mode, else one."""
        return self.num_collecting if self.sync else 1

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
        """The updater that moves the weights; the same object each time."""
        made: WeightUpdaterBase = load("weight updater")(
            self.weight_updater, self.weight_options.backend
        )
        return made

    @cached_property
    def transport_name(self) -> str:
        """The name of the transport.

        Raises:
            ArgumentError: there is no such transport, or it can't be used here.
        """
        return start.chosen(self.transport, self.default_transport)

    @property
    def masked_bound(self) -> Staleness | None:
        """Frames that are older are masked; None: none are."""
        bound = self.staleness
        return bound if bound is not None and bound.mode == "mask" else None

    @property
    def has_mask(self) -> bool:
        """True if a batch can hold padding or masked frames."""
        limits = (self.masked_bound, self.preemptive_threshold, self.batch_deadline_s)
        return any(limit is not None for limit in limits)

    def plan(self, worker_id: int = 0) -> WorkerPlan:
        weights = self.weight_options
        return replace(
            super().plan(worker_id),
            create_env_fn=self.makers[worker_id],
            swap_within_rollouts=weights.swap_within_rollouts and not self.reproducible,
            exact_version=self.reproducible,
            exclude=self._names_of(weights.exclude),
            init_fn=self.init_fn,
            pre_collect_hook=self.pre_collect_hook,
            post_collect_hook=self.post_collect_hook,
        )

    def _names_of(self, patterns: Sequence[str]) -> tuple[str, ...]:
        """Patterns of names of weights, as the names are where statistics are published too."""
        has_own_name = self.normalizer is None or self.named_models
        return tuple(each if has_own_name else f"policy.{each}" for each in patterns)

    def pickled_plans(self) -> list[PickledPlan]:
        """The pickled :class:`WorkerPlan` of each worker, by worker_id, then of servers.

        Raises:
            PolicyNotSendable: the policy can't be pickled.
            ArgumentError: another argument can't be pickled.
        """
        plans = [self.plan(each) for each in range(self.num_to_start)]
        pickled = serving.pickled_plans(self, plans) if self.has_servers else None
        return pickled or pickling.pickled_plans(plans)


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


@dataclass(frozen=True, eq=False)
class MultiAsyncOptions(WorkerOptions):
    """Arguments of :class:`~distcollect.MultiaSyncDataCollector`.

    Attributes:
        frames_per_batch: frames in each batch; a multiple of one worker's envs.
        update_at_each_batch: publish the policy's weights automatically between two batches, to
            the worker that delivered the last one.
        cat_results: has no effect, as a batch is one rollout: 0, "stack" or None.
    """

    @property
    def joins(self) -> int | str:
        return 0 if self.cat_results == "stack" else super().joins


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
            rollout from whichever worker is done first; the others keep collecting. W workers run
            at most W + min(W, 2) rollouts ahead of the trainer. If it is slower than they are and
            publishes once for each batch, frames lag by about that many versions; a ``staleness``
            bounds the lag.
        listen: "HOST:PORT" of this host, where ``distcollect worker --join`` can add workers
            at any time; None: the value of DISTCOLLECT_LISTEN, else nowhere. Under a launcher, set
            DISTCOLLECT_LISTEN instead.
        security: "tls" encrypts the connections by which workers join, "token" does not; None: what
            DISTCOLLECT_SECURITY says, else "tls" between hosts. Under a launcher, set
            DISTCOLLECT_SECURITY instead.
    """

    _: KW_ONLY
    sync: bool = False
    listen: str | None = None
    security: str | None = None

    squeeze: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    default_transport: ClassVar[str] = start.RPC

    @cached_property
    def placer(self) -> Any:
        return load("ray job").settings()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_security(self.security)
        if self.security is not None and self.transport_name != start.TCP:
            raise ArgumentError(
                f"security={self.security!r} is for transport='tcp': torch's RPC encrypts nothing"
            )


@dataclass(frozen=True, eq=False)
class DistributedOptions(RPCOptions):
    """Arguments of :class:`~distcollect.DistributedDataCollector`."""

    default_transport: ClassVar[str] = start.TCP


@dataclass(frozen=True, eq=False)
class DistributedSyncOptions(DistributedOptions):
    """Arguments of :class:`~distcollect.DistributedSyncDataCollector`.

    Attributes:
        num_workers: number of workers; None: all that the launch provides; without a launch, one
            for each maker in a list, else one for each core of this host.
    """

    _: KW_ONLY
    sync: bool = field(default=True, init=False)
