"""The collectors: what a user iterates over."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import nn

from . import arguments, recycler
from .cluster import Workers, current
from .config import Faults, Staleness, WeightSync
from .engine import StepOptions
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    PolicyError,
    WorkerError,
)
from .flat import published
from .membership import TRAINER_PEER
from .policy import Exploration
from .pool import Pool, env_seed
from .publisher import Publisher, Weights, WorkerIds
from .rollout import Header, Layout, Rollout, Slab, assemble
from .topology import num_cores
from .updaters import BroadcastUpdater, Site, WeightUpdaterBase
from .weights import PushHandle, WeightSender
from .worker import TRAJ_IDS_PER_PEER, Probe, WorkerPlan, build_engine

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"


# Of the trajectories of all collectors that step envs in this process.
_traj_ids = itertools.count(TRAINER_PEER * TRAJ_IDS_PER_PEER)

_Self = TypeVar("_Self", bound="DataCollectorBase")


class LagStats(NamedTuple):
    """Lags of a batch's frames: versions sent to their worker that are newer than their own."""

    min: int
    mean: float
    max: int


class DataCollectorBase(ABC):
    """What all collectors have in common: an iterable of batches.

    A batch is a TensorDict with exactly ``frames_per_batch`` frames, its last dimension named
    "time":

    - the observation (``"observation"``, or one key for each entry of a Dict space), ``"action"``,
      all else the policy returned, and ``"done"``, ``"terminated"``, ``"truncated"`` (bool,
      ``[..., T, 1]``);
    - under ``"next"`` the observation after the step (at the end of an episode the true final one),
      ``"reward"`` (float32 ``[..., T, 1]``), ``"done"``, ``"terminated"``, ``"truncated"``;
    - under ``"collector"`` ``"traj_ids"``, ``"policy_version"``, ``"worker_id"`` (int64
      ``[..., T]``).

    A batch is yours: it is never rewritten and shares no memory with another.

    Attributes:
        frames_per_batch: frames in each batch.
        total_frames: frames until it ends, a multiple of the above; -1: endless.
    """

    def __init__(self, *, frames_per_batch: int, total_frames: int) -> None:
        """Check the sizes. Raises as :func:`~distcollect.arguments.total_batches` does."""
        arguments.positive("frames_per_batch", frames_per_batch)
        self.frames_per_batch = frames_per_batch
        self._num_batches = arguments.total_batches(total_frames, frames_per_batch)
        self.total_frames = (
            -1 if self._num_batches is None else self._num_batches * frames_per_batch
        )
        self._delivered = 0
        self._closed = False

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the newest published weights; 0: those the policy started with.

        A frame's policy lag is this minus its ``("collector", "policy_version")``.
        """

    @property
    def frames(self) -> int:
        """Frames delivered so far."""
        return self._delivered * self.frames_per_batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are delivered; goes on where it was left."""
        while not self._exhausted:
            yield self.next()

    def next(self, timeout_s: float | None = None) -> TensorDict:
        """Block until the next batch is there.

        Args:
            timeout_s: instead of ``Faults.batch_timeout_s``.

        Raises:
            StopIteration: ``total_frames`` are delivered.
            BatchTimeout: no batch in time; names the workers waited for.
            EnvError, PolicyError: an env or the policy raised; names worker and env.
            WorkerLost: a worker's process ended.
            CollectorStateError: after :meth:`shutdown`.
        """
        self._check_open()
        if self._exhausted:
            raise StopIteration
        batch = self._next(timeout_s)
        self._delivered += 1
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise CollectorStateError("the collector was shut down: make a new one")

    @property
    def _exhausted(self) -> bool:
        return self._num_batches is not None and self._delivered >= self._num_batches

    @abstractmethod
    def _next(self, timeout_s: float | None) -> TensorDict: ...

    @abstractmethod
    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
    ) -> PushHandle | None:
        """Publish new weights; see the classes."""

    def init_updater(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - nothing to do
        """Hand arguments to the weight updater; does nothing where there is none."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and the policies' randomness; the next batch starts with a reset.

        Env i gets a seed drawn from (``seed``, i), however the envs are spread over workers; with
        ``static_seed`` all get the same.

        Returns:
            A seed that none of the envs uses, for another collector.
        """

    def shutdown(self) -> None:
        """End what the collector started and give back all it holds. Again is no error."""
        self._closed = True
        recycler.forget()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class SyncDataCollector(DataCollectorBase):
    """Steps envs in the calling process; a batch is collected when it is asked for.

    The policy is shared, not copied: training it in place shows in the next batch. Batches are
    ``[T]`` for one env, ``[n, T]`` for n.
    """

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
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        reset_at_each_iter: bool = False,
        exploration_type: object = Exploration.RANDOM,
        info_keys: InfoKeys = None,
        clip_actions: bool = False,
    ) -> None:
        """Make the envs and try out env and policy.

        Args:
            create_env_fn: env id; callable that makes a ``gymnasium.Env`` or ``VectorEnv``; an
                env itself; or a list of these, one env each. A callable with a parameter named
                ``context`` gets an :class:`~distcollect.envs.EnvContext`.
            policy: TensorDictModule, module or callable from observation to action, to
                (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
                random actions. It always sees a leading dimension of envs.
            policy_factory: makes the policy, instead of ``policy``.
            frames_per_batch: frames in each batch; a multiple of the number of envs.
            total_frames: frames until it ends; -1: endless.
            envs_per_worker: envs to make from one ``create_env_fn``.
            device: where the policy computes and batches are delivered; None: where it is, CPU.
            max_frames_per_traj: truncate trajectories after so many frames.
            init_random_frames: so many frames at the start have random actions.
            reset_at_each_iter: start every batch with a reset of all envs.
            exploration_type: "random" or "deterministic", for policies with a distribution.
            info_keys: entries of ``info`` that go into the batch as if they were observations: a
                list of names, or ``{name: space}`` where the first reset and step don't show them.
            clip_actions: clip what goes to the envs to the bounds of a Box action space.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried out.
        """
        super().__init__(frames_per_batch=frames_per_batch, total_frames=total_frames)
        arguments.positive("envs_per_worker", envs_per_worker)
        arguments.policy(policy, policy_factory)
        makers = create_env_fn if isinstance(create_env_fn, list) else [create_env_fn]
        for maker in makers:
            arguments.env_maker(maker, instances=True)
        self._device = arguments.device(device)
        self._random_frames = _check_random_frames(init_random_frames)
        plan = WorkerPlan(
            create_env_fn=create_env_fn,
            num_envs=len(makers) if isinstance(create_env_fn, list) else envs_per_worker,
            policy=policy,
            policy_factory=policy_factory,
            device=self._device,
            exploration=Exploration.of(exploration_type),
            info_keys=info_keys,
            options=_step_options(max_frames_per_traj, reset_at_each_iter, clip_actions),
        )
        self._engine = build_engine(plan, traj_ids=_traj_ids, shared=True)
        try:
            num_envs = self._engine.layout.num_envs
            self._num_steps = arguments.num_steps(frames_per_batch, 1, num_envs)
        except BaseException:
            self._engine.close()
            raise
        self._version = 0

    @property
    def policy_version(self) -> int:
        """See :class:`DataCollectorBase`."""
        return self._version

    def _next(self, timeout_s: float | None) -> TensorDict:
        # A slab of its own for each batch: it becomes the batch.
        slab = Slab(self._engine.layout, self._num_steps)
        self._engine.collect(slab, random=self.frames < self._random_frames, fresh=True)
        header = Header(
            worker_id=0,
            incarnation=0,
            sequence=self._delivered,
            num_frames=self.frames_per_batch,
            num_bytes=0,
            policy_version=(self._version, self._version),
        )
        rollout = Rollout(header, slab.tensors())
        return assemble(self._engine.layout, [rollout], squeeze=True, device=self._device)

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
            worker_ids: makes no sense here.
            wait: always done at once.

        Raises:
            TypeError: ``worker_ids`` is given.
            WeightsError: a key is missing or unknown, or has another shape or dtype.
        """
        self._check_open()
        if worker_ids is not None:
            raise ArgumentTypeError(
                "worker_ids is given, but this collector has no weight updater and no workers: it "
                "steps its envs itself"
            )
        layout = self._engine.weights.layout
        module = self._engine.weights.module
        if module is None:
            return
        if policy_or_weights is not None and policy_or_weights is not module:
            new = layout.select(policy_or_weights)
            own = layout.select(module)
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(new[name])
        self._version += 1
        self._engine.weights.version = self._version

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See :class:`DataCollectorBase`; seeds torch's global generator too."""
        self._check_open()
        num_envs = self._engine.layout.num_envs
        seeds = [env_seed(seed, 0 if static_seed else row) for row in range(num_envs)]
        self._engine.seed(seeds)
        torch.manual_seed(env_seed(seed, 0, stream=1))
        return env_seed(seed, num_envs, stream=2)

    def shutdown(self) -> None:
        """Close the envs."""
        if not self._closed:
            super().shutdown()
            self._engine.close()


class RPCDataCollector(DataCollectorBase):
    """Steps envs in worker processes, on this host or on others, each with a copy of the policy.

    Within :func:`~distcollect.run` under torchrun or srun the launch's other ranks are the
    workers; otherwise the collector starts ``num_workers`` local processes of its own.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Callable[..., Any] | None = None,
        *,
        policy_factory: Callable[[], Callable[..., Any]] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        num_workers: int | None = None,
        envs_per_worker: int = 1,
        sync: bool = False,
        cat_results: int | str = 0,
        device: torch.device | str | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        reset_at_each_iter: bool = False,
        exploration_type: object = Exploration.RANDOM,
        info_keys: InfoKeys = None,
        clip_actions: bool = False,
        models: Mapping[str, nn.Module] | None = None,
        update_at_each_batch: bool = False,
        max_weight_update_interval: int | None = None,
        weight_sync: WeightSync | None = None,
        weight_updater: WeightUpdaterBase | None = None,
        staleness: Staleness | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Start the workers, and have each try out its envs and the policy.

        Args:
            create_env_fn: env id; callable that makes a ``gymnasium.Env`` or ``VectorEnv``; or a
                list of these, one for each worker. A callable with a parameter named ``context``
                gets an :class:`~distcollect.envs.EnvContext`.
            policy: TensorDictModule, module or callable from observation to action, to
                (action, dict of extras), or to a ``torch.distributions.Distribution``; None:
                random actions. It always sees a leading dimension of envs. It is copied to the
                workers now; :meth:`update_policy_weights_` sends newer weights.
            policy_factory: makes the policy on each worker, instead of ``policy``.
            frames_per_batch: frames in each batch; in sync mode a multiple of all envs of all
                workers, in async mode of one worker's envs.
            total_frames: frames until it ends; -1: endless.
            num_workers: None: all that the launch provides, or one for each core of this host.
            envs_per_worker: envs that each worker steps.
            sync: True: a batch ``[W * n, T]`` is one rollout of each worker, rows in order of
                worker_id, collected when it is asked for. False: a batch ``[n, T]`` is one
                rollout of whichever worker is done first; all collect on meanwhile.
            cat_results: shape of a sync batch: 0 for ``[W * n, T]``, "stack" for ``[W, n, T]``.
            device: where the workers' policies compute and batches are delivered; None: CPU.
            max_frames_per_traj: truncate trajectories after so many frames.
            init_random_frames: so many frames at the start, rounded up to whole rollouts, have
                random actions.
            reset_at_each_iter: start every rollout with a reset of all envs.
            exploration_type: "random" or "deterministic", for policies with a distribution.
            info_keys: entries of ``info`` that go into the batch as if they were observations: a
                list of names, or ``{name: space}`` where the first reset and step don't show them.
            clip_actions: clip what goes to the envs to the bounds of a Box action space.
            models: further modules that are published with the policy, by name, as one version:
                an observation normaliser, an encoder inside the envs. Policy and env makers that
                refer to them do so on the workers as well.
            update_at_each_batch: publish the policy's weights by itself between two batches: in
                sync mode to all workers, in async mode to the one whose batch was taken last.
            max_weight_update_interval: with the above also to workers that are more than so many
                versions behind; and what ``worker_ids="lagging"`` means.
            weight_sync: what is sent, and when the workers use it.
            weight_updater: how it gets there; None: a :class:`BroadcastUpdater`.
            staleness: how old the policy of a delivered frame may be; None: as old as it is.
            faults: how long to wait for whom.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong; nothing was started.
            CollectorStateError: another collector is open; nothing was started.
            EnvError, PolicyError: an env or the policy failed when a worker tried it out.
            WorkerLost, WorkerMismatch, DeadlineError: a worker did not come. In all these cases
                nothing is left running.
        """
        super().__init__(frames_per_batch=frames_per_batch, total_frames=total_frames)
        arguments.positive("num_workers", num_workers, optional=True)
        arguments.positive("envs_per_worker", envs_per_worker)
        arguments.policy(policy, policy_factory)
        if cat_results not in (0, "stack") or isinstance(cat_results, bool):
            raise ArgumentError(f"cat_results={cat_results!r}: use 0 or 'stack'")
        self._device = arguments.device(device)
        self._sync = sync
        self._stack = sync and cat_results == "stack"
        self._weight_sync = weight_sync or WeightSync()
        self._staleness = staleness
        self._faults = faults or Faults()
        arguments.positive("max_weight_update_interval", max_weight_update_interval, optional=True)
        self._updates_itself = update_at_each_batch
        models = arguments.models(models)
        self._lag: LagStats | None = None
        self._updater = arguments.updater(weight_updater) or BroadcastUpdater(
            self._weight_sync.backend
        )
        launched = current()
        count = launched.num_workers(num_workers) if launched else num_workers or num_cores()
        sharing = count if sync else 1
        arguments.num_steps(frames_per_batch, sharing, envs_per_worker)
        makers = arguments.env_makers(create_env_fn, count)
        sent_policy, sent_models = arguments.portable((policy, models))
        random_frames = _check_random_frames(init_random_frames)
        plan = WorkerPlan(
            create_env_fn=None,
            num_envs=envs_per_worker,
            policy=sent_policy,
            policy_factory=policy_factory,
            device=self._device,
            exploration=Exploration.of(exploration_type),
            info_keys=info_keys,
            options=replace(
                _step_options(max_frames_per_traj, reset_at_each_iter, clip_actions),
                swap_within_rollouts=self._weight_sync.swap_within_rollouts,
            ),
            models=sent_models,
            exclude=tuple(self._weight_sync.exclude),
        )
        payloads = arguments.pickled_plans(plan, makers)
        workers = Workers(count, self._faults)
        try:
            probes = workers.configure(payloads)
            self._probe = _agreed(probes)
            gpus = {worker_id: probe.gpu for worker_id, probe in probes.items()}
            self._updater.attach(Site(workers.address, self._faults.weights_timeout_s, gpus))
            num_envs = self._probe.layout.num_envs
            steps = arguments.num_steps(frames_per_batch, sharing, num_envs)
        except BaseException:
            workers.close()
            raise
        sender = WeightSender(
            workers.transport,
            workers.peers,
            self._probe.weights,
            self._updater,
            options=self._weight_sync,
            timeout_s=self._faults.weights_timeout_s,
        )
        self._pool = Pool(
            workers.transport,
            workers.peers,
            sender,
            sync=sync,
            num_steps=steps,
            rollout_frames=num_envs * steps,
            random_frames=random_frames,
            num_frames=None if self.total_frames == -1 else self.total_frames,
            staleness=staleness,
            explain=workers.explain,
        )
        workers.on_lost = self._pool.lose
        self._publisher = Publisher(
            self._pool,
            self._probe.weights,
            published(policy if isinstance(policy, nn.Module) else None, models),
            updater=self._updater,
            options=self._weight_sync,
            max_interval=max_weight_update_interval,
        )
        self._finalizer = weakref.finalize(self, partial(_close, self._pool, workers))

    @property
    def policy_version(self) -> int:
        """See :class:`DataCollectorBase`."""
        return self._pool.version

    @property
    def num_workers(self) -> int:
        """Workers that collect."""
        return len(self._pool.worker_ids)

    @property
    def version_lag(self) -> LagStats | None:
        """The lags of the last batch's frames when it was delivered; None before the first."""
        return self._lag

    @property
    def stale_frames(self) -> dict[int, int]:
        """worker_id to frames that were not delivered, or masked, as too stale."""
        return dict(self._pool.stale_frames)

    def _next(self, timeout_s: float | None) -> TensorDict:
        limit = self._faults.batch_timeout_s if timeout_s is None else timeout_s
        try:
            if self._updates_itself and self._delivered:
                self._publisher.publish_own(sync=self._sync)
            if self._sync:
                rollouts = self._pool.gather_all(limit)
            else:
                rollouts = [self._pool.gather_next(limit)]
        except WorkerError:
            self.shutdown()
            raise
        self._publisher.last = [rollout.header.worker_id for rollout in rollouts]
        layout: Layout = self._probe.layout
        batch = assemble(layout, rollouts, device=self._device)
        self._note_lag(batch, rollouts)
        return batch.unflatten(0, (len(rollouts), layout.num_envs)) if self._stack else batch

    def _note_lag(self, batch: TensorDict, rollouts: Sequence[Rollout]) -> None:
        """Work out the lags of a batch's frames, and its mask where that is wanted."""
        masks = self._staleness is not None and self._staleness.mode == "mask"
        lags: list[torch.Tensor] = []
        for rollout, rows in zip(
            rollouts, batch["collector", "policy_version"].cpu().chunk(len(rollouts)), strict=True
        ):
            header = rollout.header
            lowest, highest = header.policy_version
            lag = torch.empty_like(rows)
            for version in [lowest] if lowest == highest else rows.unique().tolist():
                lag[rows == version] = self._pool.lag(header.worker_id, version)
            lags.append(lag)
            if masks:
                assert self._staleness is not None
                late = int((lag > self._staleness.max_policy_lag).sum())
                self._pool.stale_frames[header.worker_id] += late
        lag = torch.cat(lags)
        self._lag = LagStats(int(lag.min()), float(lag.double().mean()), int(lag.max()))
        if masks:
            assert self._staleness is not None
            fresh = lag <= self._staleness.max_policy_lag
            batch["collector", "mask"] = fresh.to(batch["collector", "policy_version"].device)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Hand arguments to the weight updater's ``init``."""
        self._check_open()
        self._updater.init(*args, **kwargs)

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
    ) -> PushHandle | None:
        """Publish new weights and send them to workers, which swap them in between two steps.

        A worker that is late, dead, or got them torn is left out; the handle tells. Who was late
        gets the newest weights as soon as it answers.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict, with ``models`` a
                dict of these by name; None: the collector's own policy and models. A copy is
                taken: training may go on at once.
            worker_ids: to whom: an int, a list, a slice; "all", or None, for all; "last_batch" for
                those whose frames are in the batch that was taken last; "lagging" for those more
                than ``max_weight_update_interval`` versions behind this one.
            wait: return when it is known of every worker whether it has them. Otherwise return at
                once; of several versions that are not sent yet only the newest is sent. In sync
                mode a worker collects only when it has the newest version sent to it.

        Returns:
            What tells who has them: ``done()``, ``wait()``, ``acknowledged``, ``left_out``. None
            for a policy without parameters, and where nobody lags: nothing is published then.

        Raises:
            WeightsError: a key is missing or unknown, or has another shape or dtype, or a value
                that was to be refused. Names the key; nothing was sent.
            ArgumentError, ArgumentTypeError: no such worker; nothing to send. Nothing was sent.
            WeightsTimeout: nobody acknowledged in time; names them.
            WorkerLost: no worker is left.
        """
        self._check_open()
        handle = self._publisher.publish(policy_or_weights, worker_ids)
        if wait and handle is not None:
            handle.wait()
        return handle

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """See :class:`DataCollectorBase`."""
        self._check_open()
        num_envs = self._probe.layout.num_envs
        self._pool.seed(seed, num_envs, static_seed=static_seed)
        return env_seed(seed, num_envs * self.num_workers, stream=2)

    def shutdown(self) -> None:
        """End the workers and reap them; takes at most ``Faults.stop_timeout_s`` and a little."""
        super().shutdown()
        self._finalizer()


def _close(pool: Pool, workers: Workers) -> None:
    pool.close()
    workers.close()


def _check_random_frames(value: int | None) -> int:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ArgumentError(f"init_random_frames={value!r}: must be a whole number, 0 or more")
    return value or 0


def _step_options(
    max_frames_per_traj: int | None, reset_at_each_iter: bool, clip_actions: bool
) -> StepOptions:
    arguments.positive("max_frames_per_traj", max_frames_per_traj, optional=True)
    return StepOptions(max_frames_per_traj, reset_at_each_iter, clip_actions)


def _agreed(probes: Mapping[int, Probe]) -> Probe:
    """The probe that all workers agree on.

    Raises:
        PolicyError: they found different spaces, numbers of envs, or weights.
    """
    first = probes[0]
    for worker_id, probe in probes.items():
        if (probe.layout, probe.weights) != (first.layout, first.weights):
            raise PolicyError(
                f"its frames or weights differ from worker 0's: {probe} instead of {first}",
                worker_id=worker_id,
            )
    return first
