"""The collector that steps envs in workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tensordict import TensorDict

from distcollect.collectors import pickling, validation
from distcollect.collectors.finalizer import Finalizer
from distcollect.collectors.progress import Collected, Progress
from distcollect.collectors.session import CLOSING_LIMIT_S, Session, stop
from distcollect.collectors.signature import takes
from distcollect.collectors.stream import Hooks, timed
from distcollect.collectors.worker_attributes import WorkerAccess
from distcollect.collectors.worker_options import RPCOptions
from distcollect.common import checks
from distcollect.common.seeding import checked_seed, next_seed
from distcollect.errors import ArgumentTypeError, CollectorStateError, WorkerError
from distcollect.integrations import load
from distcollect.launch.cpu_placement import num_cores
from distcollect.launch.preemption import exit_if_requested
from distcollect.pool.handover import RolloutReference
from distcollect.pool.policy_lag import count_lags
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.results import (
    Evaluation,
    LagStats,
    LedgerReport,
    Stats,
    WorkerState,
    WorkerThroughput,
)
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Rollout
from distcollect.rollout.layout import Layout
from distcollect.weights.broadcast import NoUpdater
from distcollect.weights.push_handle import PushHandle


class RPCDataCollector(WorkerAccess):
    """Steps envs in worker processes, on this host or on others, each with a copy of the policy.

    Within :func:`~distcollect.run` under torchrun or srun, the launch's other ranks are the
    workers; otherwise the collector starts ``num_workers`` local processes.

    It also accepts the arguments of TorchRL's ``RPCCollector`` under their names.
    """

    @takes(RPCOptions)
    def __init__(self, options: RPCOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong; nothing was started.
            CollectorStateError: another open collector has the launch's workers; nothing was
                started.
            EnvError, PolicyError: an env or the policy failed when a worker tried it.
            WorkerLost, WorkerMismatch, DeadlineError: a worker did not start, or did not join. In
                all these cases nothing is left running.
        """
        super().__init__(options)

    def _open(self) -> None:
        traces = self._monitor_thread.trace is not None
        self._session = Session(self._options, self._stats_recorder, traces=traces)
        self._count_frames(self._session.frames_per_batch)
        self._session.updater.register_collector(self)
        options = self._options
        if not (options.update_at_each_batch or isinstance(options.updater, NoUpdater)):
            self._unpublished = self._session.unpublished
        limit_s = self._options.fault_limits.stop_timeout_s + CLOSING_LIMIT_S
        self._stop_session = Finalizer(
            self, partial(stop, self._session.pool, self._session.workers), limit_s
        )

    def _release(self, *, close_envs: bool) -> None:
        self._session.pool.deliveries.claim(self._progress.claimed)
        self._stop_session()

    @property
    def policy_version(self) -> int:
        return self._session.pool.version

    @property
    def policy(self) -> Any:
        return self._options.policy

    def _set_hooks(self, hooks: Hooks) -> None:
        self._check_open()
        pickled = pickling.pickled_hooks(hooks.pre_collect, hooks.post_collect)
        self._session.set_hooks(pickled, partial(super()._set_hooks, hooks))

    @property
    def num_workers(self) -> int:
        """Number of workers that are present now, without those being replaced."""
        return self._session.workers.num_present

    @property
    def worker_states(self) -> dict[int, WorkerState]:
        """State of each worker, by worker_id."""
        return self._session.workers.states

    @property
    def worker_paces(self) -> dict[int, WorkerThroughput]:
        """How fast each worker is, by worker_id: shows which workers delay the others."""
        return self._session.pool.paces

    @property
    def ledger(self) -> LedgerReport:
        """What became of all frames that workers stepped: delivered, or lost and why.

        The count of a worker is updated with each of its rollouts, and at its end.
        """
        pool = self._session.pool
        pool.deliveries.claim(self._progress.claimed)
        return pool.ledger

    def release(self, worker_ids: int | Sequence[int]) -> None:
        """Send workers away for good, and wait until they have left.

        They finish the rollout that they are collecting, within ``Faults.leave_timeout_s``, and it
        is delivered. They are not replaced; with fewer than ``Faults.min_workers`` left the run
        ends with an error.

        Args:
            worker_ids: one worker or several.

        Raises:
            ArgumentError, ArgumentTypeError: there are no such workers.
            DeadlineError: the workers did not leave in time.
        """
        self._check_open()
        selected = checks.worker_ids(worker_ids, self._session.pool.worker_ids)
        self._session.workers.release(selected or ())

    def _snapshot(self, known: Stats) -> Stats:
        workers, pool = self._session.workers, self._session.pool
        states = {worker_id: state.value for worker_id, state in workers.states.items()}
        if known.ended:
            states = dict.fromkeys(states, WorkerState.LEFT.value)
        cores = num_cores() if workers.are_near else 0
        return self._stats_recorder.snapshot(
            replace(
                known,
                sync=self._options.sync,
                has_weights=self._session.has_weights,
                num_cores=cores,
            ),
            states=states,
            ready=pool.num_ready,
            ledger=self.ledger,
        )

    @property
    def stale_frames(self) -> dict[int, int]:
        """Number of frames that were dropped or masked as too stale, by worker_id."""
        return self._session.pool.stale_frames

    @property
    def _layout(self) -> Layout:
        return self._session.layout

    def _next(self, timeout_s: float) -> Collected:
        progress, pool = self._progress, self._session.pool
        try:
            self._publish_automatically()
            delivery = self._session.gather(timeout_s, progress.claimed)
        except WorkerError:
            # A signal that ends this process often ends its workers too: then the signal counts.
            exit_if_requested()
            self.shutdown()
            raise
        rollouts = delivery.rollouts
        headers = [rollout.header for rollout in rollouts]
        batch = self._assembled(self._layout, rollouts)
        lags = count_lags(batch, rollouts, pool.lag, self._options.mask_above)
        workers = [header.worker_id for header in headers]
        masked: Counter[int] = Counter()
        if (limit := self._options.mask_above) is not None:
            for worker_id, counts in zip(workers, lags, strict=True):
                masked[worker_id] += sum(num_frames for lag, num_frames in counts if lag > limit)
        pool.deliveries.note(delivery.number, workers, lags, masked)
        return Collected(batch, headers, _stats_of(lags), delivery.number)

    def _stamp(self) -> object:
        return self._session.pool.stamp

    def _let_go(self, then: Progress) -> None:
        self._session.pool.deliveries.forget(then.claimed)

    def _publish_automatically(self) -> None:
        if self._options.update_at_each_batch and self._progress.batches:
            with self._stats_recorder.publishing():
                self._session.publisher.publish_own(self._progress.workers, sync=self._options.sync)

    def _assembled(self, layout: Layout, rollouts: Sequence[Rollout]) -> TensorDict:
        return assemble(
            layout,
            rollouts,
            mask=self._options.has_mask,
            compact=self._options.compact_obs,
            device=self._options.devices.storing,
            shape=self._options.batch_format.shape(layout, rollouts),
        )

    def hand_over(
        self, timeout_s: float | None = None, *, keep_s: float = 60.0
    ) -> RolloutReference:
        """Give the next rollout to another trainer of the launch, without fetching it.

        Send the reference as you like (a queue, ``torch.distributed.send_object_list``); the other
        trainer's :meth:`take_over` fetches the frames directly from the worker. The :attr:`ledger`
        counts them as delivered once that trainer has them, and otherwise as lost: by "not_taken"
        after ``keep_s``, "worker_lost", or "shut_down" if this collector ends before. They count
        towards ``total_frames`` here in any case, and :class:`Staleness` limits their lag now, not
        when they are taken. Until then they occupy one of the worker's two rollout buffers, which
        it uses in turn: it collects one more rollout, and then waits until this one was taken.

        If you also call :meth:`next`, rollouts may have been fetched in advance for it. These are
        kept for it, unless no other rollout is being collected: then the frames travel with the
        reference, and count as delivered when it is made.

        Args:
            timeout_s: seconds to wait for the rollout, instead of ``Faults.batch_timeout_s``.
            keep_s: seconds for which the worker keeps the rollout, counted from now.

        Returns:
            A reference to be pickled and sent to the other trainer.

        Raises:
            StopIteration: ``total_frames`` are collected.
            ArgumentError: ``keep_s`` is not above 0, or above 1e8.
            ArgumentTypeError: ``keep_s`` is no number.
            CollectorStateError: in sync mode, with ``reproducible`` or ``trajs_per_batch``.
            BatchTimeout, EnvError, PolicyError, WorkerLost: as :meth:`next`.
        """
        self._check_hands_over("hand_over")
        keep_s = checks.plain(keep_s)
        checks.seconds(f"keep_s={keep_s!r}", keep_s)
        self._enter()
        if self._is_over():
            self._leave()
            raise StopIteration
        return self._refer(timeout_s, keep_s)

    @timed
    def _refer(self, timeout_s: float | None, keep_s: float) -> RolloutReference:
        """See :meth:`hand_over`."""
        try:
            self._publish_automatically()
            reference, number = self._session.hand_over(
                self._limit_s(timeout_s), keep_s, self._progress.claimed
            )
        except WorkerError:
            exit_if_requested()
            self.shutdown()
            raise
        header, pool = reference.header, self._session.pool
        lag = pool.lag(header.worker_id, header.policy_version[0])
        lags = [[(lag, header.num_frames)]]
        pool.deliveries.note(number, [header.worker_id], lags, {})
        before = self._progress
        then = self._after(Collected(TensorDict(), [header], _stats_of(lags), number))
        if (ready := before.ready) is not None and ready.then.claimed == before.claimed:
            # Taken over, and the buffer's extend() raised: nobody else has it.
            then = replace(then, ready=replace(ready, then=then))
        return self._referred(reference, then)

    def _referred(self, reference: RolloutReference, then: Progress) -> RolloutReference:
        """The reference, which is the caller's with this very return."""
        # Nothing is called from here on, so no signal is handled before the caller has it.
        self._progress, self._caller = then, None
        return reference

    def take_over(self, reference: RolloutReference, timeout_s: float | None = None) -> TensorDict:
        """Fetch a rollout that another trainer handed over, directly from its worker.

        This process must be able to reach the worker at the address by which the worker reaches its
        own trainer. The frames keep their ids and versions; ``("collector", "worker_id")`` is the
        worker's id at the other trainer. Their lag is measured against all versions of this
        trainer. They don't count towards ``total_frames`` here, and are in the other trainer's
        ledger. A reference can be used once, even if that fails.

        Args:
            reference: what :meth:`hand_over` returned.
            timeout_s: seconds for the worker to deliver it, instead of ``Faults.batch_timeout_s``.

        Returns:
            The batch ``[n, T]``, as :meth:`next` gives it.

        Raises:
            RolloutGone: it was taken already, ``keep_s`` has passed, or its worker is gone; names
                the worker.
            DeadlineError: the worker didn't answer in time; names it.
            ArgumentError, ArgumentTypeError: this is not a reference of this launch.
            CollectorStateError: as :meth:`hand_over`.
        """
        self._check_hands_over("take_over")
        if not isinstance(reference, RolloutReference):
            raise ArgumentTypeError(
                f"take_over({reference!r}): must be what another trainer's hand_over() gave"
            )
        self._enter()
        self._fetch(reference, timeout_s)
        try:
            return self._hand_out()
        except BaseException:
            self._leave()
            raise

    @timed
    def _fetch(self, reference: RolloutReference, timeout_s: float | None) -> None:
        """Have the batch of another trainer's rollout ready."""
        self._stats_recorder.switch_to("transfer")
        rollouts = [self._session.handover_receiver.take(reference, self._limit_s(timeout_s))]
        self._stats_recorder.switch_to("assemble")
        batch = self._assembled(reference.layout, rollouts)
        newest = self._session.pool.version
        lags = count_lags(
            batch,
            rollouts,
            lambda _, version: max(0, newest - version),
            self._options.mask_above,
        )
        shaped = self._options.batch_format.shaped(batch, reference.layout)
        self._finish(shaped, replace(self._progress, lag=_stats_of(lags)))

    def _check_hands_over(self, method: str) -> None:
        self._check_delivers()
        options = self._options
        for given, reason in (
            (options.sync, "is for sync=False: in sync mode a batch is a rollout of every worker"),
            (options.reproducible, "is not for reproducible=True: the order depends on timing"),
            (
                options.trajs_per_batch is not None,
                "is not for trajs_per_batch: trajectories span rollouts",
            ),
        ):
            if given:
                raise CollectorStateError(f"{method}() {reason}")

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``."""
        self._check_open()
        self._session.updater.init(*args, **kwargs)

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
        **names: Any,
    ) -> PushHandle | None:
        """Publish new weights and send them to workers, which swap them in between two steps.

        A worker that is late or dead, or whose copy arrives damaged, is left out; the handle says
        so. A late worker gets the newest weights as soon as it answers.

        Args:
            policy_or_weights: a module, a TensorDict of parameters or a state dict; with
                ``models``, a dict of these by name. None: the collector's own policy and models;
                if the weight updater gets weights from a server, these are loaded into them first.
                A dict by worker_id sends each worker its own, as one version after the other.
                A copy is taken, so training may continue at once.
            worker_ids: the workers to send the weights to: an int, a list, a slice; a
                ``torch.device`` or several, for workers whose policy is there; "all" or None for
                all; "last_batch" for the workers whose frames are in the last batch; "lagging" for
                workers more than ``max_weight_update_interval`` versions behind this one.
            wait: return only when it is known of every worker whether it has the weights. Otherwise
                return at once; if several versions wait to be sent, only the newest is sent. In
                sync mode a worker collects only when it has the newest version sent to it.
            names: TorchRL's other names: ``policy`` or ``weights``, in place of
                ``policy_or_weights``; ``model_id``, the one of ``models``, or "policy", that they
                are for; or ``weights_dict``, a dict of weights by these names. A model that is left
                out, or None, has the weights of the collector's own.

        Returns:
            A handle that says which workers have the weights: ``done()``, ``wait()``,
            ``acknowledged``, ``left_out``. None if nothing is published, as the policy has no
            parameters, no worker is lagging, or those of the last batch have left.

        Raises:
            WeightsError: a key is missing or unknown, has another shape or dtype, or a value that
                ``WeightSync`` refuses. Names the key; nothing was sent.
            ArgumentError, ArgumentTypeError: there is no such worker, or nothing to send. Nothing
                was sent.
            WeightsTimeout: no worker acknowledged in time; names them.
            WorkerLost: a worker had died before.
            WorkerError: no worker could receive the weights.
        """
        self._check_open()
        policy_or_weights = load("names of weights")(
            policy_or_weights, names, self._options.policy, self._options.named_models
        )
        if validation.is_by_worker(policy_or_weights):
            push = None
            for worker_id, weights in policy_or_weights.items():
                push = self.update_policy_weights_(weights, worker_ids=worker_id, wait=wait)
            return push
        self._unpublished = None  # the user knows what to call
        # A version that is sent to no worker would be unknown to workers that join later.
        self._session.workers.await_enough()
        with self._stats_recorder.publishing():
            push = self._session.publisher.publish(
                policy_or_weights, worker_ids, self._progress.workers
            )
            if wait and push is not None:
                self._session.wait_for(push)
        return push

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._check_open()
        seed, static_seed = checked_seed(seed), bool(static_seed)
        unused = self._session.unused_seed(seed)

        def note() -> None:
            self._seed = seed, static_seed
            self._drop_trajectories()

        self._session.seed(seed, static_seed=static_seed, note=note)
        if self._layout.is_torchrl:
            # What TorchRL's collector returns, which seeds its envs one after the other.
            num_envs = self._layout.num_envs * self._options.num_to_start
            return seed if static_seed else next_seed(seed, num_envs)
        return unused

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        return self._session.remote_calls.call(method, args, kwargs, worker_ids, timeout_s)

    def _evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        return self._session.remote_calls.evaluate(
            num_episodes, worker_ids, deterministic, seed, timeout_s
        )

    @property
    def evaluations(self) -> list[Evaluation]:
        """Results of the :class:`EvaluationWorkers`, in the order in which they came."""
        running = self._session.evaluators
        return [] if running is None else list(running.results)

    def _newest_evaluation(self) -> Evaluation | None:
        by_call, in_background = super()._newest_evaluation(), self.evaluations[-1:]
        candidates = in_background if by_call is None else [by_call, *in_background]
        return max(candidates, key=lambda each: int(each.policy_version.max()), default=None)

    def _resume(
        self, version: int, first_traj_id: int, frames: int, count: Callable[[], None]
    ) -> None:
        self._session.resume(version, first_traj_id, frames, count)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End and reap the workers; takes little more than ``Faults.stop_timeout_s`` at most.

        Args:
            timeout: has no effect: ``Faults.stop_timeout_s`` is the limit.
            close_env: has no effect: workers always close their envs.
            raise_on_error: False: errors of workers that end are only logged.
        """
        super().shutdown(timeout, close_env, raise_on_error)


# TorchRL's names for collectors whose workers are on any hosts.
RPCCollector = RPCDataCollector
DistributedCollector = RPCDataCollector
DistributedDataCollector = RPCDataCollector


def _stats_of(lags: Sequence[Sequence[tuple[int, int]]]) -> LagStats:
    return LagStats.of([count for counts in lags for count in counts])
