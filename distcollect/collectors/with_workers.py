"""The workers of one collector, with everything that the trainer drives them by."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDict
from torch import nn

from distcollect.collectors import pickling
from distcollect.collectors.batches import Backend, Batch, Hooks, UnpublishedChanges
from distcollect.collectors.finalizer import Finalizer, close_first_at_exit, forgotten_closings
from distcollect.collectors.options import WorkerOptions
from distcollect.collectors.user_code import without_stop
from distcollect.common import signals
from distcollect.common.peer_ids import identity
from distcollect.common.seeding import ENVS_PER_TRAINER, Stream, env_seed, next_seed
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.errors import BatchTimeout, WorkerError, WorkerLost, is_server
from distcollect.launch.open_hosts import WantedHosts
from distcollect.policy.weight_layout import published
from distcollect.pool.background_evaluation import Evaluators
from distcollect.pool.handover import HandoverReceiver, RolloutReference
from distcollect.pool.policy_lag import VersionFrames, count_lags, stats_of
from distcollect.pool.pool import Pool
from distcollect.pool.publisher import Publisher, Weights, WorkerIds
from distcollect.pool.remote_calls import EnvCall, RemoteCalls
from distcollect.pool.worker_slots import BatchPlan, RolloutRequest
from distcollect.results import Evaluation, LedgerReport, Stats, WorkerState
from distcollect.rollout.header import Rollout
from distcollect.roster.manager import Workers
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest
from distcollect.weights.broadcast import NoUpdater
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.sender import WeightSender
from distcollect.weights.updaters import UpdaterContext

log = logging.getLogger(__name__)
T = TypeVar("T")

# For the backend to close, beside Faults.stop_timeout_s.
_CLOSING_LIMIT_S = 60.0


class WithWorkers(Backend):
    """The workers of one collector and all that drives them, from start to :func:`_stop`.

    Attributes:
        workers: starts, watches and replaces the worker processes.
        pool: requests rollouts from the workers, and sends them weights in the right order.
        updater: moves weights to the workers.
        publisher: makes new versions of the weights.
        has_failed: an error of the workers was raised: the run can't go on.
    """

    has_failed = False
    _evaluators: Evaluators | None = None
    _options: WorkerOptions

    def __init__(self, options: WorkerOptions, stats_recorder: StatsRecorder) -> None:
        """Start the workers, and wait until each has tried its envs and the policy.

        Args:
            options: the collector's arguments.
            stats_recorder: counts what happens.

        Raises:
            DistCollectError: a worker did not start, or failed. Nothing is left running.
        """
        limit_s = options.fault_limits.stop_timeout_s + _CLOSING_LIMIT_S
        # A collector that was dropped just now may still have the workers of the launch.
        forgotten_closings(limit_s)
        plans = options.pickled_plans()
        super().__init__(options, stats_recorder)
        self.publishing_outdates = options.sync or options.staleness is not None
        self.updater = options.updater
        self.workers = Workers(
            options.num_to_start,
            options.fault_limits,
            partial(_plan_for, plans, options.num_to_start, options.num_collecting),
            hosts=WantedHosts(options.listen, options.security, options.is_local, options.placer),
            transport=options.transport_name,
            server_ranks=options.server_ranks,
            evaluating=options.evaluating,
        )
        if options.placer is not None:
            close_first_at_exit()
        parts: list[Any] = [self.workers]
        self._stop = Finalizer(self, partial(_stop, parts), limit_s)
        try:
            self._connect()
        except BaseException:
            # Not on this thread: an exception may have broken off what it did, and may do so again.
            self._stop()
            raise
        parts.append(self.pool)

    def _connect(self) -> None:
        """Build what drives the workers, and have the workers' manager report to the pool."""
        options, workers = self._options, self.workers
        infos = sorted(workers.worker_infos.items())
        probe, layout = next((i, i.layout) for _, i in infos if i.layout is not None)
        timeout_s = options.fault_limits.weights_timeout_s
        self._use_layout(layout)
        self._has_weights = bool(probe.weights.entries)
        self.updater.attach(
            UpdaterContext(
                workers.address,
                timeout_s,
                workers.gpus,
                workers.transport.shares_memory,
                workers.transport.host_key,
                workers.transport.carries_weights,
            )
        )
        sender = WeightSender(
            workers.transport,
            probe.weights,
            self.updater,
            options=options.weight_options,
            timeout_s=timeout_s,
        )
        self.pool = Pool(
            workers.transport,
            sender,
            self._batch_plan(),
            staleness=options.staleness,
            failure_sink=workers,
            stats_recorder=self._stats_recorder,
            has_servers=options.has_servers,
        )
        self.publisher = Publisher(
            self.pool,
            probe.weights,
            self._own_module,
            updater=self.updater,
            options=options.weight_options,
            max_interval=options.max_weight_update_interval,
            gpus=workers.gpus,
            evaluating=options.evaluating,
            complete=self._completed,
            freeze=self._freeze,
        )
        if self.statistics is not None:
            self.statistics.worker_ids = self._collecting
            self.statistics.waiting = self.pool.waiting_versions
            self.statistics.first_versions = sender.first_versions
        if not (options.update_at_each_batch or isinstance(options.updater, NoUpdater)):
            own = published(options.policy, options.published_models)
            self.unpublished = UnpublishedChanges(own, probe.weights)
        self._remote_calls = RemoteCalls(
            self.pool, self.publisher.selected, workers, self._stats_recorder
        )
        if (plan := options.evaluation) is not None:
            evaluators = Evaluators(self.pool, plan, options.evaluating, self._stats_recorder)
            self.evaluations, self._evaluators = evaluators.results, evaluators
            self.pool.on_weights = evaluators.has_weights
        self._handover_receiver = HandoverReceiver(workers.transport)
        workers.attach(self.pool)

    def ends_with(self, collector: object) -> None:
        """End when ``collector`` is gone: at once, though parts of this refer to each other."""
        self._stop.add_owner(collector)

    def _own_module(self) -> nn.Module | None:
        """What is published if the user gives no weights; None: only the user has them."""
        options = self._options
        own = published(options.policy, options.named_models)
        if own is None and self.statistics is not None and not options.factories:
            return nn.ModuleDict()  # the statistics alone
        return own

    def _freeze(self, version: int) -> None:
        if self.statistics is not None:
            self.statistics.freeze(version)

    def _collecting(self) -> list[int]:
        """The ids of all workers that may deliver frames."""
        return [each for each in self.pool.worker_ids if each not in self._options.evaluating]

    def _batch_plan(self) -> BatchPlan:
        options, num_envs = self._options, self.layout.num_envs
        return BatchPlan(
            sync=options.sync,
            num_rollouts=options.rollouts_per_batch,
            num_envs=num_envs,
            num_steps=self._num_steps,
            skew=self.layout.skew,
            random_frames=options.random_frames,
            num_frames=None if self.total_frames == -1 else self.total_frames,
            waits_for_missing=options.fault_limits.missing_share == "replacement",
            preemptive_threshold=options.preemptive_threshold,
            deadline_s=options.batch_deadline_s,
            reserved=frozenset(options.evaluating),
            in_turn=options.reproducible,
            first_env=identity().trainer * ENVS_PER_TRAINER,
        )

    @property
    def policy_version(self) -> int:
        return self.pool.version

    @property
    def policy(self) -> Any:
        return self._options.policy

    @property
    def _cores(self) -> dict[str, set[int]]:
        """The cores that the workers' hosts have for them, as far as that is known."""
        cores: defaultdict[str, set[int]] = defaultdict(set)
        for info in self.workers.worker_infos.values():
            cores[info.host].update(info.cores)
        return cores

    @property
    def _ledger(self) -> LedgerReport:
        return self.pool.ledger

    def _snapshot(self, known: Stats) -> Stats:
        cores = self._cores
        num_cores, are_here = sum(map(len, cores.values())), {*cores} == {socket.gethostname()}
        states = {w: state.value for w, state in self.workers.states.items()}
        if known.ended:
            states = dict.fromkeys(states, WorkerState.LEFT.value)
        return self._stats_recorder.snapshot(
            replace(
                known,
                sync=self._options.sync,
                staleness=getattr(self._options.staleness, "mode", ""),
                has_weights=self._has_weights,
                num_cores=num_cores,
                load=self._load_of(num_cores, known) if are_here else 0.0,
                inference_choice=self._options.chosen_inference[1],
            ),
            states=states,
            processes=dict(self.workers.processes),
            ready=self.pool.num_ready,
            ledger=self.ledger,
            evaluating=self._options.evaluating,
        )

    # Rollouts.

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.has_failed:
            # A signal that ends this process often ends its workers too: then it counts.
            signals.check()
            self.on_failure()

    def _collect(self, timeout_s: float) -> Batch:
        requests = self._noting_failures(self._gather, timeout_s)
        try:
            rollouts = [request.take_rollout() for request in requests]
            frames = self._assembled(self.layout, rollouts)
            counts = self._count_lags(frames, rollouts, self.pool.versions.lag)
        except BaseException:
            self.pool.given_up(requests, "given_up")
            raise

        def settle(cause: str | None) -> None:
            if cause is not None:
                self.pool.given_up(requests, cause)
                return
            self.pool.delivered(requests, counts)

        headers = [rollout.header for rollout in rollouts]
        return Batch(frames, headers, *stats_of(counts), settle)

    def _count_lags(
        self, rows: TensorDict, rollouts: Sequence[Rollout], lag_of: Callable[[int, int], int]
    ) -> list[VersionFrames]:
        return count_lags(
            rows, rollouts, lag_of, self.pool.versions.age, self._options.masked_bound
        )

    def _noting_failures(self, work: Callable[..., T], *args: Any) -> T:
        """Note errors of the workers; the user's functions may raise the same, of another run."""
        try:
            self._publish_automatically()
            return work(*args)
        except WorkerError:
            self.has_failed = True
            raise

    def _gather(self, timeout_s: float) -> list[RolloutRequest]:
        """The rollouts of the next batch.

        Where workers come and go by themselves, it waits for others once all have left.
        """
        while True:
            self.workers.await_enough()
            try:
                return self.pool.get(timeout_s)
            except BatchTimeout:
                if self.workers.has_enough:
                    raise

    def _publish_automatically(self) -> None:
        if self._options.update_at_each_batch and self.last_workers:
            self._warn_if_nothing_to_publish()
            with self._stats_recorder.publishing():
                self.publisher.publish_own(self.last_workers, sync=self._options.sync)

    def hand_over(self, timeout_s: float | None, keep_s: float) -> RolloutReference:
        """See :meth:`.RPCDataCollector.hand_over`."""
        if self.is_over():
            raise StopIteration
        request = self._noting_failures(self.pool.hand_over, self.limit_s(timeout_s), keep_s)
        header = request.known_header
        version, num_frames = header.policy_version[0], header.num_frames
        sent = self.pool.versions
        lag, age = sent.lag(header.worker_id, version), sent.age(version)
        self._stats_recorder.delivered([(header.worker_id, lag, num_frames)])
        counts = [VersionFrames(header.worker_id, lag, age, num_frames, is_masked=False)]
        self._count([header], *stats_of(counts))
        return RolloutReference(
            identity().trainer,
            identity().run_id,
            header,
            self.layout,
            request.slot.peer,
            self.workers.transport.address_of(request.slot.peer),
            request.key or secrets.token_hex(8),
            request.held,
            request.tensors,
        )

    def take_over(self, reference: RolloutReference, timeout_s: float | None) -> TensorDict | None:
        """See :meth:`.RPCDataCollector.take_over`; None if it went to the replay buffer."""
        if self._waiting is not None:
            self._give(self._waiting)
        self._stats_recorder.switch_to("transfer")
        rollouts = [self._handover_receiver.take(reference, self.limit_s(timeout_s))]
        self._stats_recorder.switch_to("assemble")
        rows = self._assembled(reference.layout, rollouts)
        # The worker is another trainer's.
        counts = self._count_lags(
            rows, rollouts, lambda _, version: self.pool.versions.age(version)
        )
        self.lag, self.age = stats_of(counts)
        source, headers = (reference.run_id, reference.trainer), [reference.header]
        self.rests = self._gaps.take(rows, headers, reference.layout.num_envs, source)
        frames = self._format.shaped(rows, reference.layout)

        def settle(cause: str | None) -> None:
            if cause is None:
                self._gaps.delivered()

        return self._give(Batch(without_stop(self._processed, frames), settle=settle))

    # What the user asks for between two batches.

    def _publish(
        self, weights: Weights | None, worker_ids: WorkerIds, *, wait: bool
    ) -> PushHandle | None:
        # A version that is sent to no worker would be unknown to workers that join later.
        self.workers.await_enough()
        pushes = self.publisher.publish(weights, worker_ids, self.last_workers)
        for push in pushes if wait else ():
            try:
                if push is not None:
                    push.wait()
            except WorkerLost:
                signals.check()
                # A worker that joins later starts with these weights.
                if not self.workers.is_elastic:
                    raise
        return pushes[-1]

    def set_hooks(self, hooks: Hooks) -> None:
        pickled = pickling.pickled_hooks(hooks.pre_collect, hooks.post_collect)
        self.hooks = hooks
        self.pool.set_hooks(pickled, self._options.fault_limits.batch_timeout_s)

    def seed(self, seed: int, static_seed: bool) -> int:
        num_slots = max(self.pool.worker_ids, default=-1) + 1
        as_torchrl = self.layout.is_torchrl
        timeout_s = self._options.fault_limits.batch_timeout_s
        self.pool.seed(seed, static_seed, as_torchrl=as_torchrl, timeout_s=timeout_s)
        if as_torchrl:
            # What TorchRL's collector returns, which seeds its envs one after the other.
            num_envs = self.layout.num_envs * self._options.num_to_start
            return seed if static_seed else next_seed(seed, num_envs)
        return env_seed(seed, self.layout.num_envs * num_slots, stream=Stream.NEXT_COLLECTOR)

    def call(self, call: EnvCall, worker_ids: WorkerIds) -> dict[int, list[Any]]:
        return self._remote_calls.call(call, worker_ids)

    def evaluate(self, request: EvaluationRequest, worker_ids: WorkerIds) -> Evaluation:
        if not (request.with_weights and self._options.has_servers):
            return self._remote_calls.evaluate(request, worker_ids)
        # The workers have no weights.
        found = self._remote_calls.evaluate(replace(request, with_weights=False), worker_ids)
        weights = self.publisher.weights_of(int(found.policy_version.max()))
        return replace(found, weights=weights)

    def resume(self, version: int, first_traj_id: int) -> None:
        timeout_s = self._options.fault_limits.batch_timeout_s
        self._gaps.free_ids()
        first_traj_id = identity().resume(first_traj_id)
        if self._evaluators is not None:
            before = self.policy_version
            self._evaluators.resumed(before, max(before, version))
        self.pool.resume(version, first_traj_id, self.resumed_frames, timeout_s)

    def close(self, *, close_envs: bool, failed: bool = False) -> None:
        super().close(close_envs=close_envs)
        self.workers.failed = failed
        self._stop()


def _plan_for(
    plans: Sequence[PickledPlan], num_first: int, num_collecting: int, worker_id: int
) -> PickledPlan:
    """The plan for a slot; ``plans``: of the ``num_first`` first workers, then of servers."""
    if is_server(worker_id):
        return plans[-1]
    # A worker that joins later begins again at the start of the list of makers.
    joined = worker_id - num_first
    return plans[worker_id if joined < 0 else joined % num_collecting]


def _stop(parts: Sequence[Any]) -> None:
    """Close the pool, which requests nothing more then, and the workers. To be called once.

    A finalizer has this called. It must not refer to the backend, which holds the user's arguments:
    one of these, such as a bound method, may refer to the collector, which would then never be
    finalized.
    """
    with contextlib.ExitStack() as last_first:
        # The workers' manager reaps processes and closes the transport. What other trainers may
        # still take is settled with the workers.
        for part in parts:
            last_first.callback(part.close)
    for pool in parts[1:]:
        log.info("where the frames went:\n%s", pool.ledger)
