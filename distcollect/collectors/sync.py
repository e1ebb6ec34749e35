"""The collector that steps envs in the calling process."""

from __future__ import annotations

import contextlib
import operator
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from tensordict import TensorDict

from distcollect.collectors import validation
from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.finalizer import Finalizer, close_later
from distcollect.collectors.options import SyncOptions
from distcollect.collectors.pickling import copied
from distcollect.collectors.progress import Collected
from distcollect.collectors.replay import Background
from distcollect.collectors.signature import takes
from distcollect.collectors.stream import JOIN_TIMEOUT_S
from distcollect.collectors.unpublished import PATIENCE_IN_BACKGROUND, UnpublishedChanges
from distcollect.common import checks
from distcollect.common.seeding import Stream, checked_seed, env_seed, process_seeds
from distcollect.engine.base import EngineBase
from distcollect.engine.build import build_engine, build_engine_for, build_evaluator
from distcollect.engine.interrupts import Stopped
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError
from distcollect.integrations import load
from distcollect.launch.cpu_placement import num_cores
from distcollect.policy.weight_layout import is_part, module_of, published
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.results import (
    EnvFault,
    Evaluation,
    Frames,
    LagStats,
    LedgerReport,
    Stats,
    WorkerState,
)
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout
from distcollect.rollout.slabs import AnySlab, new_slab
from distcollect.transport.peer_ids import identity

# For the envs to close at exit.
_CLOSING_LIMIT_S = 60.0


class SyncDataCollector(DataCollectorBase):
    """Steps envs in the calling process; a batch is collected when it is requested.

    The policy is shared, not copied: training it in place shows in the next batch. In the
    background, after ``start()``, it is copied. Batches are ``[T]`` for one env, ``[n, T]`` for n.

    In the background, a thread of this process steps the envs, and settings of the whole process
    apply to both: TorchRL's losses, for example, set the exploration type of all TensorDict modules
    while they compute. In that case use :class:`aSyncDataCollector`.

    Envs that it made are closed by :meth:`shutdown`, at exit, and when nobody refers to the
    collector any more; envs of yours that you passed only by :meth:`shutdown`.
    """

    _options: SyncOptions
    _unclosed: tuple[Any, ...] = ()  # what is closed in any case

    @takes(SyncOptions)
    def __init__(self, options: SyncOptions) -> None:
        """Make the envs, and try envs and policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        super().__init__(options)

    def _open(self) -> None:
        options = self._options
        traces = self._monitor_thread.trace is not None
        self._version = 0
        self._traj_ids = identity().own_traj_ids()
        self._plan = options.plan(traces=traces).with_policy_made()
        worker_id = options.worker_id
        self._num_counted = 0  # batches that the statistics have as delivered
        self._counting = threading.Lock()
        # The last seed of the envs, whether it is static, and the number of batches before it.
        self._seeded: tuple[int, bool, int] | None = None
        self._evaluator = build_evaluator(self._plan, worker_id=worker_id, shared=True)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._traj_ids.free)
            self._engine = build_engine(
                self._plan, traj_ids=self._traj_ids, worker_id=worker_id, shared=True
            )
            if_it_fails.callback(self._engine.close)
            num_envs = self._engine.layout.num_envs
            self._num_steps = validation.num_steps(
                self.frames_per_batch, 1, num_envs, rounds_up=self._engine.layout.is_torchrl
            )
            self._count_frames(self._num_steps * num_envs)
            if_it_fails.pop_all()
        if not options.has_env_instances:
            self._unclosed = self._evaluator, self._engine.envs
            Finalizer(self, partial(_shut_down, weakref.ref(self)), _CLOSING_LIMIT_S)

    def __del__(self) -> None:
        # Not by what waits for the exit: that must not refer to the envs, as a policy or a maker
        # may refer to the collector.
        if self._unclosed and self._owner.is_here:
            close_later(partial(_close, self._unclosed))

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def policy(self) -> Any:
        # With a factory as well, a module that was given is the one to publish.
        given = module_of(self._options.policy) if self._options.factories else None
        return self._plan.policy if given is None else self._options.policy

    @property
    def env(self) -> Any:
        """The env that it steps, or a list of several."""
        envs = self._engine.envs.members
        return envs[0] if len(envs) == 1 else envs

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the env, or of the first one of several."""
        return getattr(self._engine.envs.members[0], attr)

    def get_distant_attr(self, attr: str) -> Any:
        """An attribute of this collector, or with dots of its parts, such as "env.specs"."""
        return operator.attrgetter(attr)(self)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[tuple[Any, ...]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of this collector once for each of several arguments.

        Args:
            method_name: name of the method.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keyword arguments of each call.

        Raises:
            ArgumentError: the two lists have different lengths.
        """
        count = len(list_of_args or list_of_kwargs or "1")
        args = list(list_of_args or [()] * count)
        kwargs = list(list_of_kwargs or [{}] * count)
        if len(args) != len(kwargs):
            raise ArgumentError(
                f"list_of_args and list_of_kwargs must have the same length, not {len(args)} and "
                f"{len(kwargs)}"
            )
        method = self.get_distant_attr(method_name)
        return [method(*each, **named) for each, named in zip(args, kwargs, strict=True)]

    def fake_tensordict(self) -> TensorDict:
        """A batch of zeros, with the entries and the shape of the batches that it will deliver.

        Raises:
            CollectorStateError: with ``trajs_per_batch``, or with an env whose entries change their
                shapes: there a batch has no fixed shape.
        """
        self._check_open()
        layout, options = self._layout, self._options
        is_loose = layout.is_loose
        if is_loose or options.trajs_per_batch is not None:
            raise CollectorStateError(
                "fake_tensordict(): batches of this collector have no fixed shape: take a batch"
            )
        slab = new_slab(layout, self._num_steps)
        slab.clear()
        rollout = Rollout(self._header(slab), slab.local_tensors())
        rows = self._assembled(rollout).zero_()
        return options.batch_format.processed(options.batch_format.shaped(rows, layout))

    def reset(self) -> None:
        """Start the next batch with a reset of all envs.

        With ``trajs_per_batch``, the trajectories that were not delivered are dropped.
        """
        self._check_open()
        self._drop_trajectories()
        self._engine.reset()

    @property
    def _layout(self) -> Layout:
        return self._engine.layout

    def _snapshot(self, known: Stats) -> Stats:
        self._count_delivered()
        counts = self._engine.counter
        frames = Frames(counts.stepped, lost=dict(counts.lost), env_faults=counts.env_faults)
        return self._stats_recorder.snapshot(
            replace(known, sync=True, in_process=True, num_cores=num_cores()),
            states={0: WorkerState.READY.value if not known.ended else WorkerState.LEFT.value},
            ready={},
            ledger=LedgerReport({0: frames}, frames),
        )

    def _next(self, timeout_s: float) -> Collected:
        if self._hooks.pre_collect is not None:
            self._hooks.pre_collect()
        self._count_delivered()
        self._settle("interrupted")
        # Each batch needs a slab of its own: the slab's memory becomes the batch.
        slab = new_slab(self._engine.layout, self._num_steps)
        self._stats_recorder.switch_to("collect")
        try:
            self._engine.collect(slab, random=self.frames < self._options.random_frames, fresh=True)
        except Stopped:
            raise CollectorStateError("the collector was shut down meanwhile") from None
        header = self._header(slab)._replace(
            env_faults=self._engine.counter.env_faults,
            faults=tuple(
                EnvFault(0, 0, socket.gethostname(), time_s, message)
                for time_s, message in self._engine.counter.take_faults()
            ),
            work=self._engine.step_timer.work(),
            spans=self._engine.step_timer.spans(),
        )
        self._stats_recorder.switch_to("assemble")
        self._stats_recorder.collected(header)
        rollout = Rollout(header, slab.local_tensors())
        return Collected(self._assembled(rollout), [header], LagStats(0, 0.0, 0))

    def _settle(self, cause: str, *, is_broken: bool = False) -> None:
        """Count frames that were stepped, and did not reach the user, as lost."""
        num_kept = self._progress.batches * self.frames_per_batch
        self._engine.settle(cause, num_kept=num_kept, is_broken=is_broken)

    def _count_delivered(self) -> None:
        """Have the statistics count the batches that the user has got since the last call."""
        with self._counting:
            num_batches = self._progress.batches - self._num_counted
            if num_batches > 0:
                self._num_counted += num_batches
                self._stats_recorder.delivered([(0, [(0, num_batches * self.frames_per_batch)])])

    def _assembled(self, rollout: Rollout) -> TensorDict:
        layout, options = self._layout, self._options
        return assemble(
            layout,
            [rollout],
            compact=options.compact_obs,
            device=options.devices.storing,
            shape=options.batch_format.shape(layout, [rollout]),
        )

    def _header(self, slab: AnySlab) -> Header:
        return Header(
            worker_id=0,
            incarnation=0,
            sequence=self._progress.batches,
            num_frames=slab.num_frames,
            num_steps=slab.num_steps,
            num_bytes=0,
            policy_version=(self._version, self._version),
        )

    def _stamp(self) -> object:
        return self._version, self._seed, self._background is None

    def _processed(self, batch: TensorDict) -> TensorDict:
        batch = super()._processed(batch)
        if self._hooks.post_collect is not None:
            self._hooks.post_collect(batch)
        return batch

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
        **names: Any,
    ) -> None:
        """Publish new weights: a new ``policy_version`` from the next frame on.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict to copy into the
                policy; None, or the policy itself: it has these weights already.
            worker_ids: must be None, as there are no workers.
            wait: has no effect: the weights are in use at once.
            names: TorchRL's other names, as for collectors with workers.

        Raises:
            TypeError: ``worker_ids`` is given.
            WeightsError: a key is missing or unknown, or has another shape or dtype.
        """
        self._check_open()
        if worker_ids is not None:
            raise ArgumentTypeError(
                "worker_ids is given, but this collector has no weight updater and no workers: it "
                "steps its envs itself; leave worker_ids out"
            )
        policy_or_weights = load("names of weights")(
            policy_or_weights, names, self._plan.policy, self._plan.models
        )
        with self._stats_recorder.publishing():
            self._publish(policy_or_weights)

    def _publish(self, policy_or_weights: Weights | None) -> None:
        weights = self._engine.weights
        own = published(self._plan.policy, self._plan.models)
        if policy_or_weights is None and self.policy is not self._plan.policy:
            policy_or_weights = published(self.policy, self._plan.models)
        if policy_or_weights is not None and not is_part(policy_or_weights, own):
            weights.layout.load(policy_or_weights, own)
        if own is None:
            return
        self._version += 1
        self._unpublished = None  # the user knows what to call
        if self._background is None:
            weights.version = self._version
        else:
            buffer = weights.spare()
            weights.layout.pack(weights.layout.select(own), buffer)
            weights.commit(buffer, self._version)

    def _use(self, background: Background) -> None:
        # The new engine resets the envs. If an exception breaks this off, the old one goes on.
        self._settle("given_up", is_broken=True)
        policy, models = copied(self._plan.policy, self._plan.models)
        plan = replace(self._plan, policy=policy, models=models)
        counter = self._engine.counter
        engine = build_engine_for(self._engine.envs, plan, traj_ids=self._traj_ids, counter=counter)
        engine.weights.version = self._version
        num_batches = self._progress.batches
        if self._seeded is not None:
            seed, static_seed, since = self._seeded
            if num_batches > since:
                # The seed itself would repeat the episodes from then on.
                seed = env_seed(seed, num_batches - since, stream=Stream.BACKGROUND)
            self._seed_engine(engine, seed, static_seed)
        own = published(self._plan.policy, self._plan.models)
        self._unpublished = UnpublishedChanges(
            own, engine.weights.layout, patience=PATIENCE_IN_BACKGROUND
        )
        evaluator = build_evaluator(plan, worker_id=self._options.worker_id)
        # At once: what is done elsewhere depends on whether there is a background.
        self._engine, self._background = engine, background
        before, self._evaluator = self._evaluator, evaluator
        if self._unclosed:
            self._unclosed = evaluator, engine.envs
        before.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs, the policy's randomness, and torch's, numpy's and Python's generators.

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
        seed, static_seed = checked_seed(seed), bool(static_seed)
        unused = env_seed(seed, self._engine.layout.num_envs, stream=Stream.NEXT_COLLECTOR)
        self._drop_trajectories()
        self._seed = seed, static_seed
        self._seeded = seed, static_seed, self._progress.batches
        self._seed_engine(self._engine, seed, static_seed)
        if self._engine.next_seed is None:
            return unused
        return seed if static_seed else self._engine.next_seed

    @staticmethod
    def _seed_engine(engine: EngineBase, seed: int, static_seed: bool) -> None:
        envs, as_torchrl = range(engine.layout.num_envs), engine.layout.is_torchrl
        engine.seed(*process_seeds(seed, envs, 0, static=static_seed, as_torchrl=as_torchrl))

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        checks.worker_ids(worker_ids, [0])
        with self._paused(timeout_s):
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
        if self._options.has_env_instances:
            raise ArgumentError(
                "evaluate() needs envs of its own: pass the collector a callable that makes one "
                "instead of an env"
            )
        with self._paused(timeout_s):
            self._engine.weights.apply()
            return self._evaluator.evaluate(
                num_episodes,
                version=self._engine.weights.version,
                deterministic=deterministic,
                seed=seed,
                timeout_s=timeout_s,
            )

    def _paused(self, timeout_s: float) -> AbstractContextManager[None]:
        """Within, the thread that collects in the background waits."""
        if self._background is None:
            return contextlib.nullcontext()
        return self._background.paused(timeout_s)

    def _resume(
        self, version: int, first_traj_id: int, frames: int, count: Callable[[], None]
    ) -> None:
        self._version = self._engine.weights.version = version
        identity().resume(first_traj_id)
        self._traj_ids = identity().own_traj_ids()
        self._engine.use_traj_ids(self._traj_ids)
        count()

    def _release(self, *, close_envs: bool) -> None:
        self._engine.stop()
        if self._has_stopped():
            self._settle("shut_down", is_broken=True)
        self._traj_ids.free()
        try:
            self._evaluator.close()
        finally:
            if close_envs:
                self._engine.close()
            self._unclosed = ()

    def _has_stopped(self) -> bool:
        """Wait for the thread that collects; whether it does no more."""
        if self._background is not None:
            return self._background.join(JOIN_TIMEOUT_S)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while self._busy not in (None, threading.get_ident()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._busy is None


def _close(parts: Sequence[Any]) -> None:
    for part in parts:
        part.close()


def _shut_down(reference: weakref.ref[SyncDataCollector]) -> None:
    collector = reference()
    if collector is not None:
        collector.shutdown()
