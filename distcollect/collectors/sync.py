"""The collector that steps envs in the calling process."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors import validation
from distcollect.collectors.base import (
    JOIN_TIMEOUT_S,
    DataCollectorBase,
    EnvMaker,
    InfoKeys,
    LagStats,
    check_random_frames,
    ends_telling_if_it_fails,
    step_options,
)
from distcollect.collectors.batch_format import BatchFormat, PostProcess
from distcollect.collectors.replay import ReplayBuffer, check_replay_buffer
from distcollect.collectors.torchrl_compat import takes_torchrl_names
from distcollect.common import checks
from distcollect.common.seeding import Stream, env_seed, policy_seed
from distcollect.config import Faults, Monitor
from distcollect.engine.build import (
    WorkerPlan,
    build_engine,
    build_evaluator,
    engine_over,
    with_policy,
)
from distcollect.engine.env_recovery import Stopped
from distcollect.envs.make import is_env
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError
from distcollect.launch.cpu_placement import num_cores
from distcollect.policy.base import Exploration
from distcollect.policy.weight_layout import published
from distcollect.results import Evaluation, Frames, LedgerReport, State, Stats
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout
from distcollect.rollout.slab import Slab
from distcollect.trainer.publisher import Weights, WorkerIds

# Of the trajectories of all collectors that step envs in this process.
_traj_ids = itertools.count()


class SyncDataCollector(DataCollectorBase):
    """Steps envs in the calling process; a batch is collected when it is asked for.

    The policy is shared, not copied: training it in place shows in the next batch. In the
    background, after ``start()``, it is copied. Batches are ``[T]`` for one env, ``[n, T]`` for n.

    In the background, a thread of this process steps the envs, and settings of the whole process
    apply to both: TorchRL's losses, for example, set the exploration type of all TensorDict modules
    while they compute. In that case use :class:`aSyncDataCollector`.
    """

    @takes_torchrl_names
    @ends_telling_if_it_fails
    def __init__(
        self,
        create_env_fn: EnvMaker
        | gym.Env[Any, Any]
        | gym.vector.VectorEnv[Any, Any, Any]
        | list[Any],
        policy: Callable[..., Any] | None = None,
        *,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        envs_per_worker: int = 1,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        env_device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: PostProcess | None = None,
        split_trajs: bool | None = None,
        trajs_per_batch: int | None = None,
        set_truncated: bool = False,
        compact_obs: bool = False,
        replay_buffer: ReplayBuffer | None = None,
        exploration_type: object = Exploration.RANDOM,
        info_keys: InfoKeys = None,
        clip_actions: bool = False,
        models: Mapping[str, nn.Module] | None = None,
        faults: Faults | None = None,
        monitor: Monitor | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make the envs and try out env and policy.

        Args:
            create_env_fn: an env id; a callable that makes a ``gymnasium.Env`` or ``VectorEnv``, a
                TorchRL ``EnvBase`` or a PettingZoo ``ParallelEnv``; an env itself; or a list of
                these, one env each. A callable with a parameter named ``context`` gets an
                :class:`~distcollect.EnvContext`.
            policy: TensorDictModule, module or callable from observation to action, to
                (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
                random actions. It always sees a leading dimension of envs.
            policy_factory: called to make the policy, instead of ``policy``.
            frames_per_batch: frames in each batch; a multiple of the number of envs.
            total_frames: frames after which it ends, rounded up to whole batches; -1: endless.
            envs_per_worker: envs to make from one ``create_env_fn``.
            device: the default of the following three.
            storing_device: where batches are delivered; None: CPU.
            env_device: where TorchRL envs compute; others have no choice.
            policy_device: where the policy computes; None: where it is.
            max_frames_per_traj: truncate trajectories after this many frames.
            init_random_frames: this many frames at the start have random actions.
            reset_at_each_iter: start every batch with a reset of all envs.
            postproc: called with each batch; what it returns is delivered.
            split_trajs: deliver ``[trajectories, longest]``, one row for each trajectory of the
                batch, padded with zeros; padding is False in ``("collector", "mask")``.
            trajs_per_batch: deliver this many whole trajectories at a time, in the order in which
                they end, padded as with ``split_trajs``; fewer at the very end.
            set_truncated: mark the last frame of each row truncated and done, unless the episode
                terminated there.
            compact_obs: leave out the observations under "next", for half the memory. They equal
                the next frame's, except at the end of an episode or row, where they are lost.
            replay_buffer: where frames go, ``[F]`` at a time, instead of to whoever iterates.
            exploration_type: "random" or "deterministic" (or TorchRL's ``ExplorationType``), for
                policies with a distribution.
            info_keys: entries of ``info`` that go into the batch as if they were observations: a
                list of names, or ``{name: space}`` where the first reset and step don't show them.
            clip_actions: clip actions to the bounds of a Box space before they go to the envs.
            models: further modules, by name, whose weights are published with the policy's.
            faults: how often an env may raise; the timeouts concern workers only.
            monitor: how to show and record the run while it goes on.
            trace: a file to record what the process does; see :class:`~distcollect.Monitor`.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried out.
        """
        delivery = BatchFormat(
            squeeze=True,
            set_truncated=set_truncated,
            compact_obs=compact_obs,
            split_trajs=bool(split_trajs),
            trajs_per_batch=trajs_per_batch,
            postproc=postproc,
        )
        super().__init__(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            delivery=delivery,
            replay_buffer=check_replay_buffer(replay_buffer),
            faults=faults,
            monitor=monitor,
            trace=trace,
        )
        checks.positive("envs_per_worker", envs_per_worker)
        validation.policy(policy, policy_factory)
        makers = create_env_fn if isinstance(create_env_fn, list) else [create_env_fn]
        for maker in makers:
            validation.env_maker(maker, instances=True)
        devices = validation.devices(device, storing_device, env_device, policy_device)
        self._storing_device = devices.storing
        self._random_frames = check_random_frames(init_random_frames)
        plan = WorkerPlan(
            create_env_fn=create_env_fn,
            num_envs=len(makers) if isinstance(create_env_fn, list) else envs_per_worker,
            policy=policy,
            policy_factory=policy_factory,
            device=devices.policy,
            env_device=devices.env,
            exploration=Exploration.of(exploration_type),
            info_keys=info_keys,
            options=step_options(max_frames_per_traj, reset_at_each_iter, clip_actions),
            models=validation.models(models),
            max_env_faults=self._faults.max_env_faults,
            traces=self._monitor_thread.trace is not None,
        )
        self._plan = plan = with_policy(plan)
        self._engine = build_engine(plan, traj_ids=_traj_ids, shared=True)
        self._evaluator = build_evaluator(plan, shared=True)
        self._has_makers = not any(is_env(maker) for maker in makers)
        try:
            num_envs = self._engine.layout.num_envs
            self._num_steps = validation.num_steps(frames_per_batch, 1, num_envs)
        except BaseException:
            self._engine.close()
            raise
        self._version = 0

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def _layout(self) -> Layout:
        return self._engine.layout

    def _snapshot(self, about: Stats) -> Stats:
        counts = self._engine.counts
        frames = Frames(counts.stepped, lost=dict(counts.lost))
        return self._stats_recorder.snapshot(
            replace(about, sync=True, in_process=True, num_cores=num_cores()),
            states={0: State.READY.value if not about.ended else State.LEFT.value},
            ready={},
            ledger=LedgerReport({0: frames}, frames),
        )

    def _next(self, timeout_s: float) -> tuple[TensorDict, Sequence[Header]]:
        # A slab of its own for each batch: it becomes the batch.
        slab = Slab(self._engine.layout, self._num_steps)
        self._stats_recorder.switch_to("collect")
        try:
            self._engine.collect(slab, random=self.frames < self._random_frames, fresh=True)
        except Stopped:
            raise CollectorStateError("the collector was shut down meanwhile") from None
        header = Header(
            worker_id=0,
            incarnation=0,
            sequence=self._batches,
            num_frames=slab.num_frames,
            num_steps=slab.num_steps,
            num_bytes=0,
            policy_version=(self._version, self._version),
            env_faults=self._engine.counts.env_faults,
            work=self._engine.step_timer.work(),
            spans=self._engine.step_timer.spans(),
        )
        self._stats_recorder.switch_to("assemble")
        self._stats_recorder.collected(header)
        self._stats_recorder.delivered([(0, [(0, slab.num_frames)])])
        rollout = Rollout(header, slab.tensors())
        self._lag = LagStats(0, 0.0, 0)
        rows = assemble(
            self._layout,
            [rollout],
            compact=self._batch_format.compact_obs,
            device=self._storing_device,
        )
        return rows, [header]

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
    ) -> None:
        """Publish new weights: a new ``policy_version`` from the next frame on.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict to copy into the
                policy; None, or the policy itself: it has them already.
            worker_ids: must be None, as there are no workers.
            wait: has no effect: it is done at once.

        Raises:
            TypeError: ``worker_ids`` is given.
            WeightsError: a key is missing or unknown, or has another shape or dtype.
        """
        self._check_open()
        if worker_ids is not None:
            raise ArgumentTypeError(
                "worker_ids is given, but this collector has no weight updater and no workers: it "
                "steps its envs itself; leave them out"
            )
        if self._engine.weights.module is None:
            return
        with self._stats_recorder.publishing():
            self._publish(policy_or_weights)

    def _publish(self, policy_or_weights: Weights | None) -> None:
        weights = self._engine.weights
        own = published(self._plan.policy, self._plan.models)
        if policy_or_weights is not None and policy_or_weights is not own:
            weights.layout.load(policy_or_weights, own)
        self._version += 1
        if self._background is None:
            weights.version = self._version
        else:
            buffer = weights.spare()
            weights.layout.pack(weights.layout.select(own), buffer)
            weights.commit(buffer, self._version)

    def _before_start(self) -> None:
        policy, models = copy.deepcopy((self._plan.policy, dict(self._plan.models)))
        plan = replace(self._plan, policy=policy, models=models)
        self._engine = engine_over(self._engine.envs, plan, traj_ids=_traj_ids)
        self._engine.weights.version = self._version
        if self._seed is not None and not self._batches:
            self.set_seed(*self._seed)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs, the policy's randomness, and torch's global generator.

        The next batch starts with a reset. See :meth:`DataCollectorBase.set_seed`.

        Args:
            seed: a whole number, 0 or more.
            static_seed: all envs get the same seed, instead of one each.

        Returns:
            A seed that none of the envs uses, for another collector.

        Raises:
            CollectorStateError: it was shut down, or collects in the background.
        """
        self._check_open()
        if self._background is not None:
            raise CollectorStateError("set_seed() must come before start()")
        num_envs = self._engine.layout.num_envs
        env_seeds = [env_seed(seed, 0 if static_seed else row) for row in range(num_envs)]
        policy_seeds = [policy_seed(seed, row) for row in range(num_envs)]
        self._seed = seed, static_seed
        self._engine.seed(env_seeds, policy_seeds)
        torch.manual_seed(policy_seeds[0])
        return env_seed(seed, num_envs, stream=Stream.NEXT_COLLECTOR)

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        checks.worker_ids(worker_ids, [0])
        with self._idle(timeout_s):
            return {0: self._engine.envs.call(method, args, kwargs)}

    def _evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        checks.worker_ids(worker_ids, [0])
        if not self._has_makers:
            raise ArgumentError(
                "evaluate() needs envs of its own: pass the collector a callable that makes one "
                "instead of an env"
            )
        with self._idle(timeout_s):
            return self._evaluator.evaluate(
                num_episodes,
                version=self._version,
                deterministic=deterministic,
                seed=seed,
                timeout_s=timeout_s,
            )

    def _idle(self, timeout_s: float) -> AbstractContextManager[None]:
        """Within, the thread that collects in the background waits."""
        if self._background is None:
            return contextlib.nullcontext()
        return self._background.paused(timeout_s)

    def _next_traj_id(self) -> int:
        return next(_traj_ids)

    def _resume(self, version: int, first_traj_id: int, frames: int) -> None:
        global _traj_ids  # noqa: PLW0603 - ids are unique in this process
        self._version = self._engine.weights.version = version
        _traj_ids = itertools.count(max(first_traj_id, next(_traj_ids)))
        self._engine.number(_traj_ids)

    def shutdown(self) -> None:
        """Close the envs."""
        if self._closed:
            return
        super().shutdown()
        if self._background is not None:
            self._engine.stop()
            self._background.join(JOIN_TIMEOUT_S)
        try:
            self._evaluator.close()
            if self._close_env:
                self._engine.close()
        finally:
            self._end_watch()
