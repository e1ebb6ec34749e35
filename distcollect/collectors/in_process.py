"""Steps the envs of a collector in the calling process."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from distcollect.collectors.background import JOIN_TIMEOUT_S, Background
from distcollect.collectors.batches import (
    Backend,
    Batch,
    Hooks,
    UnpublishedChanges,
)
from distcollect.collectors.finalizer import Finalizer, close_later
from distcollect.collectors.options import SyncOptions
from distcollect.collectors.pickling import copied
from distcollect.common import checks, signals
from distcollect.common.forks import Owner
from distcollect.common.peer_ids import identity
from distcollect.common.random_state import random_state_restored
from distcollect.common.seeding import ENVS_PER_TRAINER, Stream, env_seed, process_seeds
from distcollect.engine.base import EngineBase
from distcollect.engine.build import build_engine, build_engine_for
from distcollect.engine.evaluator import Evaluator
from distcollect.engine.interrupts import Stopped
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError, EnvError
from distcollect.launch.cpu_placement import num_cores
from distcollect.policy.weight_layout import is_part, module_of, published
from distcollect.pool.policy_lag import count_lags, stats_of
from distcollect.pool.publisher import Weights, WorkerIds, is_by_worker
from distcollect.pool.remote_calls import EnvCall
from distcollect.results import (
    Evaluation,
    Frames,
    LedgerReport,
    Stats,
    WorkerState,
)
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.slabs import new_slab
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest

# For the envs to close at exit.
_CLOSING_LIMIT_S = 60.0


class InProcess(Backend):
    """One engine, on the thread that asks for a batch.

    Attributes:
        engine: steps the envs.
    """

    _options: SyncOptions

    def __init__(self, options: SyncOptions, stats_recorder: StatsRecorder) -> None:
        """Make the envs, and try envs and policy. If this raises, nothing is left open.

        Raises:
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        super().__init__(options, stats_recorder)
        self._version = 0
        self._num_rollouts = 0
        # The last seed of the envs, whether it is static, and the number of rollouts before it.
        self._seeded: tuple[int, bool, int] | None = None
        self._plan = replace(options.plan().with_policy_made(), shares_policy=True)
        self._traj_ids = identity().own_traj_ids()
        worker_id = options.worker_id
        build = partial(build_engine, worker_id=worker_id)
        self._evaluator = Evaluator(self._plan, build)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(identity().free_traj_ids, self._traj_ids)
            self.engine = build(self._plan, traj_ids=self._traj_ids)
            if_it_fails.callback(self.engine.close)
            self._use_layout(self.engine.layout)
            if_it_fails.pop_all()
        self._process = Owner()
        # What is to be closed if nobody calls close(); envs of the user's stay open.
        self._unclosed: tuple[Any, ...] = ()
        if not options.has_env_instances:
            self._unclosed = self._evaluator, self.engine.envs
            Finalizer(self, partial(_close_at_exit, weakref.ref(self)), _CLOSING_LIMIT_S)

    def __del__(self) -> None:
        # Not by what waits for the exit: that must not refer to the envs, as a policy or a maker
        # may refer to the collector.
        if vars(self).get("_unclosed") and self._process.is_here:
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
    def _ledger(self) -> LedgerReport:
        counts, delivered = self.engine.counter, self.frames - self.resumed_frames
        stepped, lost = counts.stepped, dict(counts.lost)
        frames = Frames(
            stepped,
            delivered,
            lost,
            open=stepped - delivered - sum(lost.values()),
            env_faults=counts.env_faults,
        )
        return LedgerReport({0: frames}, frames)

    def _snapshot(self, known: Stats) -> Stats:
        cores = num_cores()
        return self._stats_recorder.snapshot(
            replace(
                known,
                sync=True,
                in_process=True,
                num_cores=cores,
                load=self._load_of(cores, known),
            ),
            states={0: WorkerState.READY.value if not known.ended else WorkerState.LEFT.value},
            processes={0: (os.getpid(), socket.gethostname())},
            ready={},
            ledger=self.ledger,
        )

    # Batches.

    def _collect(self, timeout_s: float) -> Batch:
        if self.hooks.pre_collect is not None:
            self.hooks.pre_collect()
        # Each batch needs a slab of its own: the slab's memory becomes the batch.
        slab = new_slab(self.layout, self._num_steps, shared=None)
        self._stats_recorder.switch_to("collect")
        if self.statistics is not None and self._background is None:
            self.statistics.freeze(self._version)  # as weights that change in place are in use
        random = self.frames < self._options.random_frames
        engine = self.engine
        try:
            with signals.waking(engine.interrupts.wake):
                engine.collect(slab, random=random, fresh=True, frames=self.frames)
        except Stopped:
            raise CollectorStateError("the collector was shut down meanwhile") from None
        header = engine.header(slab, 0, 0, self._num_rollouts)
        self._num_rollouts += 1
        self._stats_recorder.switch_to("assemble")
        self._stats_recorder.collected(header)
        rollouts, newest = [Rollout(header, slab.local_tensors())], self._version
        try:
            frames = self._assembled(self.layout, rollouts)
            # In the background, there may be newer weights than those at its beginning.
            counts = count_lags(frames, rollouts, lambda _, used: newest - used, newest.__sub__)
        except BaseException:
            self._give_up("given_up")
            raise

        def settle(cause: str | None) -> None:
            if cause is None:
                self._stats_recorder.delivered((0, each.lag, each.num_frames) for each in counts)
            else:
                self._give_up(cause)

        return Batch(frames, [header], *stats_of(counts), settle)

    def _give_up(self, cause: str) -> None:
        """Count all frames that the user does not have as lost."""
        num_kept = self.frames - self.resumed_frames
        self.engine.settle(cause, num_kept=num_kept, is_broken=True)

    def _processed(self, frames: TensorDict) -> TensorDict:
        frames = super()._processed(frames)
        if self.hooks.post_collect is not None and self._trajectories is None:
            self.hooks.post_collect(frames)
        return frames

    def _shaped(self, batch: Batch) -> TensorDict:
        rows = super()._shaped(batch)
        if self.hooks.post_collect is not None and self._trajectories is not None:
            self.hooks.post_collect(rows[0])
        return rows

    def zeros(self) -> TensorDict:
        """Return a batch of zeros, see :meth:`.SyncDataCollector.fake_tensordict`."""
        slab = new_slab(self.layout, self._num_steps, shared=None)
        slab.clear()
        counts = slab.num_frames, slab.num_steps
        header = Header(0, 0, 0, *counts, 0, (0, 0), wire_form=slab.wire_form)
        frames = self._assembled(self.layout, [Rollout(header, slab.local_tensors())])
        if self.statistics is not None and not self.statistics.is_raw:
            frames = self.statistics.normalized(frames)  # integers become floats
        return self._format.processed(self._format.shaped(frames, self.layout).zero_())

    # What the user asks for between two batches.

    def set_hooks(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def _publish(self, weights: Weights | None, worker_ids: WorkerIds, *, wait: bool) -> None:
        if worker_ids is not None or is_by_worker(weights):
            raise ArgumentTypeError(
                "workers are named, but this collector has no weight updater and no workers: it "
                "steps its envs itself; leave worker_ids out"
            )
        with self._alone() if self._background is None else contextlib.nullcontext():
            self._publish_here(weights)

    def _publish_here(self, weights: Weights | None) -> None:
        live = self.engine.weights
        own = published(self._plan.policy, self._plan.models)
        if weights is None and self.policy is not self._plan.policy:
            weights = published(self.policy, self._plan.models)
        is_given = weights is not None and not is_part(weights, own)
        new = self._completed(weights) if is_given else own
        selected: dict[str, torch.Tensor] = {}
        if self._background is not None and new is not None:
            # It has a copy of its own: the policy that is trained stays as it is.
            selected = live.layout.select(new)
        elif is_given:
            live.layout.load(new, own)
        if own is None:
            return
        self._version += 1
        if self.statistics is not None:
            self.statistics.freeze(self._version)
        if self._background is None:
            live.version = self._version
        else:
            buffer = live.spare()
            live.layout.pack(selected, buffer)
            live.commit(buffer, self._version)

    def use(self, background: Background) -> None:
        if self._options.named_models:
            raise ArgumentError(
                "start() and models=: envs in this process have your own modules, which change "
                "while you train; leave models= out if only the policy uses them, or use "
                "aSyncDataCollector, whose worker has copies"
            )
        self.drop("given_up")
        self._evaluator.close()
        policy, models = copied(self._plan.policy, self._plan.models)
        plan = replace(self._plan, policy=policy, models=models, shares_policy=False)
        envs, counter = self.engine.envs, self.engine.counter
        self._give_up("given_up")  # the new engine resets the envs, also if this raises
        with random_state_restored():  # the trainer goes on with its own numbers
            engine = build_engine_for(envs, plan, traj_ids=self._traj_ids, counter=counter)
            if self._seeded is not None:
                seed, static_seed, since = self._seeded
                if self._num_rollouts > since:
                    # The seed itself would repeat the episodes from then on.
                    num_rollouts = self._num_rollouts - since
                    seed = env_seed(seed, num_rollouts, stream=Stream.BACKGROUND)
                _seed_engine(engine, seed, static_seed)
        engine.weights.version = self._version
        own = published(self._plan.policy, self._plan.models)
        super().use(background)
        self.unpublished = UnpublishedChanges(own, engine.weights.layout)
        build = partial(build_engine, worker_id=self._options.worker_id)
        self._evaluator = Evaluator(plan, build)
        self.engine = engine
        self._give_up("given_up")  # it learns how many frames the user has
        if self._unclosed:
            self._unclosed = self._evaluator, engine.envs

    def seed(self, seed: int, static_seed: bool) -> int:
        unused = env_seed(seed, self.layout.num_envs, stream=Stream.NEXT_COLLECTOR)
        self._seeded = seed, static_seed, self._num_rollouts
        with self._alone():
            _seed_engine(self.engine, seed, static_seed)
        if self.engine.next_seed is None:
            return unused
        return seed if static_seed else self.engine.next_seed

    def call(self, call: EnvCall, worker_ids: WorkerIds) -> dict[int, list[Any]]:
        checks.worker_ids(worker_ids, [0])
        with self._paused(call.timeout_s):
            return {0: self.engine.envs.call(call.method, call.args, call.kwargs)}

    def evaluate(self, request: EvaluationRequest, worker_ids: WorkerIds) -> Evaluation:
        checks.worker_ids(worker_ids, [0])
        if self._options.has_env_instances:
            raise ArgumentError(
                "evaluate() needs envs of its own: pass the collector a callable that makes one "
                "instead of an env"
            )
        with self._paused(request.timeout_s):
            self.engine.weights.apply()
            try:
                return self._evaluator.evaluate(request, self.engine.weights)
            except EnvError as error:
                self._stats_recorder.evaluation_failed(error)
                raise

    def _paused(self, timeout_s: float) -> AbstractContextManager[None]:
        """Within, the thread that collects in the background waits."""
        return self._alone() if self._background is None else self._background.paused(timeout_s)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, no other thread makes a batch.

        Raises, on entering:
            CollectorStateError: another thread does.
        """
        if self._has_turn:  # a hook, postproc or the user's buffer
            yield
            return
        self._begin_turn()
        try:
            yield
        finally:
            self._end_turn()

    def resume(self, version: int, first_traj_id: int) -> None:
        self._version = self.engine.weights.version = version
        identity().resume(first_traj_id)
        self._traj_ids = identity().own_traj_ids()
        self.engine.use_traj_ids(self._traj_ids)

    def close(self, *, close_envs: bool, failed: bool = False) -> None:
        self.engine.stop()
        super().close(close_envs=close_envs)
        ends = self.has_ended
        if self._background is not None:
            self._background.stop()
            ends = self._background.join
        if ends(JOIN_TIMEOUT_S):
            self._give_up("shut_down")
        identity().free_traj_ids(self._traj_ids)
        try:
            self._evaluator.close()
        finally:
            self._unclosed = ()  # also if an env's close() raises
            if close_envs:
                self.engine.close()


def _close(parts: Sequence[Any]) -> None:
    for part in parts:
        part.close()


def _close_at_exit(reference: weakref.ref[InProcess]) -> None:
    backend = reference()
    if backend is not None and backend._unclosed:  # noqa: SLF001 - the class is above
        backend.close(close_envs=True)


def _seed_engine(engine: EngineBase, seed: int, static_seed: bool) -> None:
    first, as_torchrl = identity().trainer * ENVS_PER_TRAINER, engine.layout.is_torchrl
    envs = range(first, first + engine.layout.num_envs)
    engine.seed(*process_seeds(seed, envs, 0, static=static_seed, as_torchrl=as_torchrl))
