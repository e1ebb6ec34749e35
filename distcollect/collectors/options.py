"""The arguments of the collectors: their names, defaults, texts and checks, each written once.

Each collector takes one of the classes here and in :mod:`.worker_options` (see :mod:`.signature`):
the fields are the collector's arguments, and the text of each field is the text of the argument in
``help()``. To add an argument, add a field and its text.

A field that a class sets with ``init=False`` is fixed there, and can't be given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors import validation
from distcollect.collectors.replay import ReplayBuffer
from distcollect.collectors.stacklevel import users_stack_level
from distcollect.collectors.validation import Devices
from distcollect.config import Faults, Monitor, Normalize
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.kinds import is_env
from distcollect.policy.base import Exploration
from distcollect.policy.normalize import Normalizer
from distcollect.policy.weight_layout import STATISTICS, module_of, uncompiled

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
        init_random_frames: the first frames, this many rounded up to whole rollouts, have
            random actions.
        reset_at_each_iter: start every rollout with a reset of all envs.
        postproc: called with each batch, in this process; what it returns is delivered.
        split_trajs: deliver ``[trajectories, longest]``, one row for each trajectory of the
            batch, padded with zeros; padding is False in ``("collector", "mask")``.
        trajs_per_batch: deliver exactly this many whole trajectories at a time, in the order in
            which they end, padded as with ``split_trajs``. At the end, fewer are dropped. A
            ``replay_buffer`` gets all that are whole, as soon as there is one.
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
        weights = {name: value.cpu() for name, value in module.state_dict().items()}
        return [partial(_with_weights, factory, weights) for factory in factories]

    def plan(self, worker_id: int = 0, *, traces: bool) -> WorkerPlan:
        """Make the plan of an engine, with the policy and the env makers as they were given.

        Args:
            worker_id: of the worker that has the engine; 0 without workers.
            traces: whether the engine records what it does when.
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
            traces=traces,
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
        init_random_frames: this many frames at the start have random actions.
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
