"""The workers of one collector, with everything that the trainer drives them by."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from distcollect.collectors.finalizer import Finalizer, close_first_at_exit, forgotten_closings
from distcollect.collectors.unpublished import UnpublishedChanges
from distcollect.collectors.worker_options import WorkerOptions
from distcollect.common.seeding import Stream, env_seed
from distcollect.errors import BatchTimeout, WorkerLost
from distcollect.launch.preemption import exit_if_requested
from distcollect.policy.weight_layout import published
from distcollect.pool.deliveries import Delivery
from distcollect.pool.handover import HandoverReceiver, RolloutReference
from distcollect.pool.pool import Pool
from distcollect.pool.publisher import Publisher
from distcollect.pool.remote_calls import RemoteCalls, evaluators
from distcollect.pool.worker_slots import BatchPlan
from distcollect.rollout.layout import Layout
from distcollect.roster.manager import Workers
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.peer_ids import identity
from distcollect.transport.worker_service import WorkerInfo
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.sender import WeightSender
from distcollect.weights.updaters import UpdaterContext

log = logging.getLogger(__name__)

_ENVS_PER_TRAINER = 1 << 24
# For a session to close, beside Faults.stop_timeout_s.
CLOSING_LIMIT_S = 60.0


class Session:
    """The workers of one collector and all that drives them, from start to :meth:`close`.

    Attributes:
        workers: starts, watches and replaces the worker processes.
        pool: requests rollouts from the workers, and sends them weights in the right order.
        updater: moves weights to the workers.
        publisher: makes new versions of the weights.
        remote_calls: calls methods of the envs, and has workers evaluate.
        evaluators: have some workers evaluate in the background; None: there are none.
        handover_receiver: fetches rollouts that another trainer handed over.
        layout: of a worker's rollouts.
        frames_per_batch: frames in each batch: rounded up for TorchRL's envs.
        has_weights: whether the policy has weights that can be published.
        unpublished: notices changes of the weights, until some are published.
    """

    def __init__(
        self, options: WorkerOptions, stats_recorder: StatsRecorder, *, traces: bool
    ) -> None:
        """Start the workers, and wait until each has tried its envs and the policy.

        Args:
            options: the collector's arguments.
            stats_recorder: counts what happens.
            traces: whether the workers record what they do when.

        Raises:
            DistCollectError: a worker did not start, or failed. Nothing is left running.
        """
        # A collector that was dropped just now may still have the workers of the launch.
        forgotten_closings(options.fault_limits.stop_timeout_s + CLOSING_LIMIT_S)
        plans = options.pickled_plans(traces=traces)
        self._options = options
        self.updater = options.updater
        self.workers = Workers(
            options.num_to_start,
            options.fault_limits,
            # A worker that joins later begins again at the start of the list of makers.
            lambda worker_id: plans[worker_id % len(plans)],
            listen=options.listen,
            local=options.is_local,
            placer=options.placer,
        )
        if options.placer is not None:
            close_first_at_exit()
        try:
            self._connect(stats_recorder)
        except BaseException:
            # Not on this thread: an exception may have broken off what it did, and may do so again.
            Finalizer(self, self.workers.close, CLOSING_LIMIT_S)()
            raise

    def _connect(self, stats_recorder: StatsRecorder) -> None:
        """Build what drives the workers, and have the workers' manager report to the pool."""
        options, workers = self._options, self.workers
        probe: WorkerInfo = next(iter(workers.worker_infos.values()))
        timeout_s = options.fault_limits.weights_timeout_s
        self.layout: Layout = probe.layout
        self.has_weights = bool(probe.weights.entries)
        num_envs = self.layout.num_envs
        self._num_steps = options.num_steps(num_envs, rounds_up=probe.layout.is_torchrl)
        self.frames_per_batch = self._num_steps * num_envs * options.rollouts_per_batch
        self.updater.attach(
            UpdaterContext(
                workers.address,
                timeout_s,
                workers.gpus,
                workers.transport.shares_memory,
                workers.transport.host_key,
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
            stats_recorder=stats_recorder,
        )
        self.publisher = Publisher(
            self.pool,
            probe.weights,
            partial(published, options.policy, options.named_models),
            updater=self.updater,
            options=options.weight_options,
            max_interval=options.max_weight_update_interval,
            gpus=workers.gpus,
            evaluating=options.evaluating,
        )
        own = published(options.policy, options.named_models)
        self.unpublished = UnpublishedChanges(own, probe.weights)
        self.remote_calls = RemoteCalls(self.pool, self.publisher.selected, workers.ends)
        self.evaluators = evaluators(self.pool, options.evaluation, options.evaluating)
        self.handover_receiver = HandoverReceiver(workers.transport)
        workers.attach(self.pool)

    def _batch_plan(self) -> BatchPlan:
        options, num_envs = self._options, self.layout.num_envs
        num_frames = options.rounded_total_frames(self.frames_per_batch)
        return BatchPlan(
            sync=options.sync,
            num_rollouts=options.rollouts_per_batch,
            num_envs=num_envs,
            num_steps=self._num_steps,
            random_frames=options.random_frames,
            num_frames=None if num_frames == -1 else num_frames,
            waits_for_missing=options.fault_limits.missing_share == "replacement",
            preemptive_threshold=options.preemptive_threshold,
            deadline_s=options.batch_deadline_s,
            reserved=frozenset(options.evaluating),
            in_turn=options.reproducible,
            first_env=identity().trainer * _ENVS_PER_TRAINER,
        )

    # Run.

    def gather(self, timeout_s: float, claimed: int) -> Delivery:
        """The rollouts of the next batch, in the order of worker_id.

        Where workers come and go by themselves, it waits for others once all have left.

        Args:
            timeout_s: seconds to wait.
            claimed: number of the last delivery that the user has.

        Raises:
            BatchTimeout: not all rollouts came in time; names the workers waited for.
            DistCollectError: the run can't go on.
        """
        while True:
            self.workers.await_enough()
            try:
                return self.pool.deliveries.get(timeout_s, claimed)
            except BatchTimeout:
                if not self.workers.is_elastic or self.workers.num_present:
                    raise

    def wait_for(self, push: PushHandle) -> None:
        """Wait until it is known of every worker whether it has the weights.

        Raises:
            WorkerLost: a worker had died before, and no other worker will come.
            WeightsTimeout, WorkerError: see :meth:`PushHandle.wait`.
        """
        try:
            push.wait()
        except WorkerLost:
            exit_if_requested()
            # A worker that joins later starts with these weights.
            if not self.workers.is_elastic:
                raise

    def hand_over(
        self, timeout_s: float, keep_s: float, claimed: int
    ) -> tuple[RolloutReference, int]:
        """A reference to the next rollout, which its worker keeps for ``keep_s`` seconds.

        Returns:
            The reference, and the number of the delivery.

        Raises: as :meth:`gather`.
        """
        delivery = self.pool.deliveries.hand_over(timeout_s, keep_s, claimed)
        [request] = delivery.requests
        reference = RolloutReference(
            identity().trainer,
            identity().run_id,
            request.known_header,
            self.layout,
            request.slot.peer,
            self.workers.transport.address_of(request.slot.peer),
            request.key,
            request.held,
            request.tensors,
        )
        return reference, delivery.number

    def unused_seed(self, seed: int) -> int:
        """A seed that none of the envs uses if all workers get ``seed``."""
        num_slots = max(self.pool.worker_ids, default=-1) + 1
        return env_seed(seed, self.layout.num_envs * num_slots, stream=Stream.NEXT_COLLECTOR)

    def seed(self, seed: int, *, static_seed: bool, note: Callable[[], None]) -> None:
        """Seed all workers.

        ``note`` is called when the seed counts, also for workers that join later.

        Raises:
            DeadlineError, WorkerError: see :meth:`.Pool.seed`.
        """
        timeout_s = self._options.fault_limits.batch_timeout_s
        as_torchrl = self.layout.is_torchrl
        self.pool.seed(seed, static_seed, as_torchrl=as_torchrl, timeout_s=timeout_s, note=note)

    def set_hooks(self, hooks: bytes, note: Callable[[], None]) -> None:
        """Have all workers call these hooks; see :meth:`.Pool.set_hooks`."""
        self.pool.set_hooks(hooks, self._options.fault_limits.batch_timeout_s, note)

    def resume(
        self, version: int, first_traj_id: int, frames: int, note: Callable[[], None]
    ) -> None:
        """Continue the counts of another run; see :meth:`.Pool.resume`."""
        timeout_s = self._options.fault_limits.batch_timeout_s
        self.pool.resume(version, identity().resume(first_traj_id), frames, timeout_s, note)


def stop(pool: Pool, workers: Workers) -> None:
    """End a session's parts, in this order. To be called once.

    A finalizer of the collector has this called. It must not refer to the session: the session
    holds the user's arguments, and one of these, such as a bound method, may refer to the
    collector, which would then never be finalized.
    """
    try:
        # No more requests. What other trainers may still take is settled with the workers.
        pool.close()
    finally:
        # Stops the workers, reaps their processes, and closes the transport.
        workers.close()
    log.info("where the frames went:\n%s", pool.ledger)
