"""The collector that steps envs in workers."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors import pickling, validation
from distcollect.collectors.base import (
    DataCollectorBase,
    EnvMaker,
    InfoKeys,
    LagStats,
    check_random_frames,
    ends_telling_if_it_fails,
    step_options,
    timed,
)
from distcollect.collectors.batch_format import BatchFormat, PostProcess
from distcollect.collectors.replay import ReplayBuffer, check_replay_buffer
from distcollect.collectors.torchrl_compat import takes_torchrl_names
from distcollect.common import checks
from distcollect.common.seeding import Stream, env_seed
from distcollect.config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from distcollect.engine.build import WorkerPlan
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchTimeout,
    CollectorStateError,
    WorkerError,
    WorkerLost,
)
from distcollect.launch.cpu_placement import num_cores
from distcollect.launch.preemption import exit_if_requested
from distcollect.launch.worker_hosts import current
from distcollect.policy.base import Exploration
from distcollect.policy.weight_layout import published
from distcollect.results import Evaluation, LedgerReport, State, Stats, WorkerThroughput
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout
from distcollect.supervision.manager import Workers
from distcollect.trainer.handover import HandoverReceiver, RolloutReference
from distcollect.trainer.policy_lag import count_lags
from distcollect.trainer.pool import Pool
from distcollect.trainer.publisher import Publisher, Weights, WorkerIds
from distcollect.trainer.remote_calls import RemoteCalls, evaluators
from distcollect.trainer.worker_slots import BatchPlan
from distcollect.transport.peer_ids import TRAJ_IDS_PER_PEER, TRAJ_IDS_PER_TRAINER, identity
from distcollect.weights.broadcast import default_updater
from distcollect.weights.push_handle import PushHandle
from distcollect.weights.sender import WeightSender
from distcollect.weights.updaters import UpdaterContext, WeightUpdaterBase

log = logging.getLogger(__name__)

_ENVS_PER_TRAINER = 1 << 24


class RPCDataCollector(DataCollectorBase):
    """Steps envs in worker processes, on this host or on others, each with a copy of the policy.

    Within :func:`~distcollect.run` under torchrun or srun, the launch's other ranks are the
    workers; otherwise the collector starts ``num_workers`` local processes.

    It also accepts the arguments of TorchRL's ``RPCCollector`` under their names.
    """

    # Rollouts of a single env have no row dimension in TorchRL's collectors for one host.
    _squeezes = False
    _is_local = False

    @takes_torchrl_names
    @ends_telling_if_it_fails
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
        update_at_each_batch: bool = False,
        max_weight_update_interval: int | None = None,
        weight_sync: WeightSync | None = None,
        weight_updater: WeightUpdaterBase | None = None,
        staleness: Staleness | None = None,
        faults: Faults | None = None,
        preemptive_threshold: float | None = None,
        batch_deadline_s: float | None = None,
        evaluation: EvaluationWorkers | None = None,
        reproducible: bool = False,
        listen: str | None = None,
        monitor: Monitor | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        """Start the workers, and have each try out its envs and the policy.

        Args:
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
            total_frames: frames after which it ends, rounded up to whole batches; -1: endless.
            num_workers: None: all that the launch provides; without a launch, one for each maker in
                a list, else one for each core of this host.
            envs_per_worker: envs that each worker steps.
            sync: True: a batch ``[W * n, T]`` is one rollout from each worker, rows in the order of
                worker_id, collected when it is asked for. False: a batch ``[n, T]`` is one
                rollout from whichever worker is done first; the others keep collecting.
            cat_results: shape of a sync batch: 0 for ``[W * n, T]``, "stack" for ``[W, n, T]``, -1
                for ``[n, W * T]``.
            device: the default of the following three.
            storing_device: where batches are delivered; None: CPU.
            env_device: where TorchRL envs compute; others have no choice.
            policy_device: where the workers' policies compute; None: where the policy is.
            max_frames_per_traj: truncate trajectories after this many frames.
            init_random_frames: the first frames, this many rounded up to whole rollouts, have
                random actions.
            reset_at_each_iter: start every rollout with a reset of all envs.
            postproc: called with each batch on the trainer; what it returns is delivered.
            split_trajs: deliver ``[trajectories, longest]``, one row for each trajectory of the
                batch, padded with zeros; padding is False in ``("collector", "mask")``.
            trajs_per_batch: deliver this many whole trajectories at a time, in the order in which
                they end, padded as with ``split_trajs``; fewer at the very end.
            set_truncated: mark the last frame of each row of each rollout truncated and done,
                unless the episode terminated there.
            compact_obs: leave out the observations under "next", for half the memory. They equal
                the next frame's, except at the end of an episode or row, where they are lost.
            replay_buffer: where frames go, ``[F]`` at a time, instead of to whoever iterates.
            exploration_type: "random" or "deterministic" (or TorchRL's ``ExplorationType``), for
                policies with a distribution.
            info_keys: entries of ``info`` that go into the batch as if they were observations: a
                list of names, or ``{name: space}`` where the first reset and step don't show them.
            clip_actions: clip actions to the bounds of a Box space before they go to the envs.
            models: further modules, by name, that are published with the policy as one version: an
                observation normalizer, an encoder inside the envs. Policy and env makers that
                refer to them refer to the workers' copies there.
            update_at_each_batch: publish the policy's weights automatically between two batches: in
                sync mode to all workers, in async mode to the one whose batch was taken last.
            max_weight_update_interval: ``update_at_each_batch`` also sends to workers that are more
                than this many versions behind; ``worker_ids="lagging"`` means these.
            weight_sync: what is sent, and when the workers use it.
            weight_updater: how weights are sent; None: an :class:`AutoUpdater`, or if
                ``weight_sync`` names a backend a :class:`BroadcastUpdater`.
            staleness: how old the policy of a delivered frame may be; None: any age.
            faults: what counts as a failure, and what is done about it.
            preemptive_threshold: in sync mode, once this share of a batch's rollouts is there
                (above 0, at most 1), the other workers are told to deliver what they have. The
                missing frames are padding: False in ``("collector", "mask")``.
            batch_deadline_s: in sync mode, the same, this many seconds after a batch was asked for.
            reproducible: in async mode, the same batches each time (after ``set_seed``). Workers
                deliver in turn. Each begins a rollout when the batch after its previous one is
                asked for, with the weights published by then, and keeps these to the end. So a
                frame's lag is the number of publications meanwhile: one less than there are
                workers, if each batch is followed by one. Once a worker dies, batches differ.
            evaluation: how many of the workers evaluate the policy instead of collecting.
            listen: "HOST:PORT" of this host, where ``distcollect worker --join`` can add workers
                at any time; None: what DISTCOLLECT_LISTEN says, else nowhere. Under a launcher, set
                DISTCOLLECT_LISTEN instead.
            monitor: how to show and record the run while it goes on.
            trace: a file to record what every process does; see :class:`~distcollect.Monitor`.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong; nothing was started.
            CollectorStateError: another collector is open; nothing was started.
            EnvError, PolicyError: an env or the policy failed when a worker tried it out.
            WorkerLost, WorkerMismatch, DeadlineError: a worker did not start, or did not join. In
                all these cases nothing is left running.
        """
        delivery = BatchFormat(
            cat_results,
            self._squeezes,
            set_truncated,
            compact_obs,
            bool(split_trajs),
            trajs_per_batch,
            postproc,
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
        checks.positive("num_workers", num_workers, optional=True)
        checks.positive("envs_per_worker", envs_per_worker)
        validation.policy(policy, policy_factory)
        if cat_results != 0 and not sync:
            raise ArgumentError(
                f"cat_results={cat_results!r} is for sync=True: without it a batch is one rollout"
            )
        devices = validation.devices(device, storing_device, env_device, policy_device)
        self._storing_device = devices.storing
        self._sync = sync
        self._weight_sync = weight_sync or WeightSync()
        masks = staleness is not None and staleness.mode == "mask"
        self._mask_above = staleness.max_policy_lag if staleness and masks else None
        self._masks = masks or preemptive_threshold is not None or batch_deadline_s is not None
        if reproducible and staleness is not None and not masks:
            raise ArgumentError(
                f"reproducible=True and {staleness}: the lag is fixed then; mode='mask' would do"
            )
        checks.positive("max_weight_update_interval", max_weight_update_interval, optional=True)
        self._updates_itself = update_at_each_batch
        models = validation.models(models)
        self._updater = validation.updater(weight_updater) or default_updater(
            self._weight_sync.backend
        )
        validation.stragglers(preemptive_threshold, batch_deadline_s, sync=sync)
        count = self._num_to_start(num_workers, create_env_fn)
        num_collecting = validation.num_collecting(count, evaluation)
        sharing = num_collecting if sync else 1
        validation.num_steps(frames_per_batch, sharing, envs_per_worker)
        makers = validation.env_makers(create_env_fn, count)
        sent_policy, sent_models = pickling.portable((policy, models))
        random_frames = check_random_frames(init_random_frames)
        swaps = self._weight_sync.swap_within_rollouts and not reproducible
        plan = WorkerPlan(
            create_env_fn=None,
            num_envs=envs_per_worker,
            policy=sent_policy,
            policy_factory=policy_factory,
            device=devices.policy,
            env_device=devices.env,
            exploration=Exploration.of(exploration_type),
            info_keys=info_keys,
            options=replace(
                step_options(max_frames_per_traj, reset_at_each_iter, clip_actions),
                swap_within_rollouts=swaps,
                exact_version=reproducible,
            ),
            models=sent_models,
            exclude=tuple(self._weight_sync.exclude),
            max_env_faults=self._faults.max_env_faults,
            traces=self._monitor_thread.trace is not None,
        )
        payloads = pickling.pickled_plans(plan, makers)
        workers = Workers(
            count,
            self._faults,
            # Those that join later begin with the list of makers again.
            lambda worker_id: payloads[worker_id % count],
            listen=listen,
            local=self._is_local,
        )
        try:
            self._probe = next(iter(workers.probes.values()))
            self._updater.attach(
                UpdaterContext(
                    workers.address,
                    self._faults.weights_timeout_s,
                    workers.gpus,
                    workers.transport.is_near,
                )
            )
            num_envs = self._probe.layout.num_envs
            self._pool = Pool(
                workers.transport,
                WeightSender(
                    workers.transport,
                    self._probe.weights,
                    self._updater,
                    options=self._weight_sync,
                    timeout_s=self._faults.weights_timeout_s,
                ),
                BatchPlan(
                    sync=sync,
                    num_rollouts=sharing,
                    num_envs=num_envs,
                    num_steps=validation.num_steps(frames_per_batch, sharing, num_envs),
                    random_frames=random_frames,
                    num_frames=None if self.total_frames == -1 else self.total_frames,
                    waits_for_missing=self._faults.missing_share == "replacement",
                    preemptive_threshold=preemptive_threshold,
                    deadline_s=batch_deadline_s,
                    reserved=frozenset(range(num_collecting, count)),
                    in_turn=reproducible,
                    first_env=workers.first_traj_id // TRAJ_IDS_PER_TRAINER * _ENVS_PER_TRAINER,
                ),
                staleness=staleness,
                failure_sink=workers,
                stats_recorder=self._stats_recorder,
            )
            self._evaluators = evaluators(self._pool, evaluation, range(num_collecting, count))
            workers.attach(self._pool)
        except BaseException:
            workers.close()
            raise
        self._workers = workers
        self._taker = HandoverReceiver(workers.transport)
        self._reproducible = reproducible
        self._first_traj_id = workers.first_traj_id
        self._publisher = Publisher(
            self._pool,
            self._probe.weights,
            published(policy, models),
            updater=self._updater,
            options=self._weight_sync,
            max_interval=max_weight_update_interval,
            gpus=workers.gpus,
        )
        self._remote_calls = RemoteCalls(self._pool, self._publisher.selected)
        self._finalizer = weakref.finalize(self, partial(_close, self._pool, workers))

    def _num_to_start(self, num_workers: int | None, create_env_fn: object) -> int:
        launched = None if self._is_local else current()
        if launched is not None:
            return launched.num_workers(num_workers)
        if num_workers is None and isinstance(create_env_fn, list | tuple):
            return len(create_env_fn)
        return num_workers or num_cores()

    @property
    def policy_version(self) -> int:
        return self._pool.version

    @property
    def num_workers(self) -> int:
        """Number of workers that are present now, without those being replaced."""
        return self._workers.num_present

    @property
    def worker_states(self) -> dict[int, State]:
        """State of each worker, by worker_id."""
        return self._workers.states

    @property
    def worker_paces(self) -> dict[int, WorkerThroughput]:
        """How fast each worker is, by worker_id: shows which ones hold up the others."""
        return self._pool.paces

    @property
    def ledger(self) -> LedgerReport:
        """What became of all frames that workers stepped: delivered, or lost and why.

        What a worker stepped becomes known with its next rollout, or at its end.
        """
        return self._pool.ledger

    def release(self, worker_ids: int | Sequence[int]) -> None:
        """Send workers away for good, and wait until they have left.

        They finish the rollout that they are collecting, within ``Faults.leave_timeout_s``, and it
        is delivered. They are not replaced; with fewer than ``Faults.min_workers`` left the run
        ends with an error.

        Args:
            worker_ids: one worker or several.

        Raises:
            ArgumentError, ArgumentTypeError: there are no such workers.
            DeadlineError: they did not end in time.
        """
        self._check_open()
        selected = checks.worker_ids(worker_ids, self._pool.worker_ids)
        self._workers.release(selected or ())

    def _snapshot(self, about: Stats) -> Stats:
        workers = self._workers
        states = {worker_id: state.value for worker_id, state in workers.states.items()}
        if about.ended:
            states = dict.fromkeys(states, State.LEFT.value)
        return self._stats_recorder.snapshot(
            replace(about, sync=self._sync, num_cores=num_cores() if workers.are_near else 0),
            states=states,
            ready=self._pool.num_ready,
            ledger=self._pool.ledger,
        )

    @property
    def stale_frames(self) -> dict[int, int]:
        """How many frames were dropped or masked as too stale, by worker_id."""
        return dict(self._pool.stale_frames)

    @property
    def _layout(self) -> Layout:
        layout: Layout = self._probe.layout
        return layout

    def _next(self, timeout_s: float) -> tuple[TensorDict, Sequence[Header]]:
        try:
            self._publish_itself()
            rollouts = self._gather(timeout_s)
            while rollouts is None:
                rollouts = self._gather(timeout_s)
        except WorkerError:
            exit_if_requested()  # who tells this process to end tells the workers as well
            self.shutdown()
            raise
        self._publisher.last = [rollout.header.worker_id for rollout in rollouts]
        batch = self._assembled(self._layout, rollouts)
        headers = [rollout.header for rollout in rollouts]
        lags = self._note_lags(batch, rollouts, self._pool.lag)
        workers = [header.worker_id for header in headers]
        self._stats_recorder.delivered(zip(workers, lags, strict=True))
        if (limit := self._mask_above) is not None:
            for worker_id, counts in zip(workers, lags, strict=True):
                masked = sum(num_frames for lag, num_frames in counts if lag > limit)
                self._pool.stale_frames[worker_id] += masked
        return batch, headers

    def _publish_itself(self) -> None:
        if self._updates_itself and self._batches:
            with self._stats_recorder.publishing():
                self._publisher.publish_own(sync=self._sync)

    def _assembled(self, layout: Layout, rollouts: Sequence[Rollout]) -> TensorDict:
        return assemble(
            layout,
            rollouts,
            mask=self._masks,
            compact=self._batch_format.compact_obs,
            device=self._storing_device,
        )

    @timed
    def hand_over(
        self, timeout_s: float | None = None, *, keep_s: float = 60.0
    ) -> RolloutReference:
        """Give the next rollout to another trainer of the launch, without fetching it.

        Send the reference as you like (a queue, ``torch.distributed.send_object_list``); the other
        trainer's :meth:`take_over` gets the frames straight from the worker. In the :attr:`ledger`
        they are delivered once that trainer has them, and otherwise lost: by "not_taken" after
        ``keep_s``, "worker_lost", or "shut_down" if this collector ends before. They count towards
        ``total_frames`` here, whatever becomes of them, and :class:`Staleness` bounds their lag
        now, not when they are taken. Until then they occupy one of the worker's two rollout
        buffers, so at most one rollout of a worker can wait while it keeps collecting.

        If you also call :meth:`next`, rollouts may have been fetched ahead for it. These are left
        for it, unless no other is being collected: then the frames travel with the reference, and
        are delivered when it is made.

        Args:
            timeout_s: seconds to wait for the rollout, instead of ``Faults.batch_timeout_s``.
            keep_s: seconds for which the worker keeps it, from now on.

        Returns:
            A reference to be pickled and sent to the other trainer.

        Raises:
            StopIteration: ``total_frames`` are collected.
            ArgumentError: ``keep_s`` is not a positive, finite number.
            CollectorStateError: in sync mode, with ``reproducible`` or ``trajs_per_batch``.
            BatchTimeout, EnvError, PolicyError, WorkerLost: as :meth:`next`.
        """
        self._check_hands_over("hand_over")
        if not 0 < keep_s <= threading.TIMEOUT_MAX:
            raise ArgumentError(f"keep_s={keep_s!r}: must be a number of seconds above 0")
        self._check_not_over()
        try:
            self._publish_itself()
            request, key = self._pool.hand_over(self._limit_s(timeout_s), keep_s)
        except WorkerError:
            self.shutdown()
            raise
        assert request.offer is not None
        worker_id, header = request.slot.worker_id, request.offer.header
        self._publisher.last = [worker_id]
        lag = self._pool.lag(worker_id, header.policy_version[0])
        self._stats_recorder.delivered([(worker_id, [(lag, header.num_frames)])])
        self._note_batch()
        return RolloutReference(
            identity().trainer,
            identity().run_id,
            header,
            self._layout,
            request.slot.peer,
            self._workers.transport.contact(request.slot.peer),
            key,
            None if request.rollout is None else request.rollout.tensors,
        )

    @timed
    def take_over(self, reference: RolloutReference, timeout_s: float | None = None) -> TensorDict:
        """Fetch a rollout that another trainer handed over, straight from its worker.

        This process has to be able to reach the worker at the address on the worker's route to its
        own trainer. The frames keep their ids and versions; ``("collector", "worker_id")`` is the
        worker's id with the other trainer. Their lag is measured against all versions of this
        trainer. They don't count towards ``total_frames`` here, and are in the other trainer's
        ledger. A reference can be used once, also if that fails.

        Args:
            reference: what :meth:`hand_over` returned.
            timeout_s: seconds for the worker to deliver it, instead of ``Faults.batch_timeout_s``.

        Returns:
            The batch ``[n, T]``, as :meth:`next` gives it.

        Raises:
            RolloutGone: it was taken already, or it is too late, or its worker is gone; names the
                worker.
            DeadlineError: the worker didn't answer in time; names it.
            ArgumentError, ArgumentTypeError: this is not a reference of this launch.
            CollectorStateError: as :meth:`hand_over`.
        """
        self._check_hands_over("take_over")
        if not isinstance(reference, RolloutReference):
            raise ArgumentTypeError(
                f"take_over({reference!r}): must be what another trainer's hand_over() gave"
            )
        self._stats_recorder.switch_to("transfer")
        rollouts = [self._taker.take(reference, self._limit_s(timeout_s))]
        self._stats_recorder.switch_to("assemble")
        batch = self._assembled(reference.layout, rollouts)
        newest = self._pool.version
        self._note_lags(batch, rollouts, lambda _, version: max(0, newest - version))
        return self._handed_on(self._batch_format.shaped(batch, reference.layout))

    def _check_hands_over(self, method: str) -> None:
        self._check_may_take()
        for is_so, reason in (
            (self._sync, "is for sync=False: a batch of sync mode is a rollout of every worker"),
            (self._reproducible, "is not for reproducible=True: it depends on who comes when"),
            (self._whole is not None, "is not for trajs_per_batch: those span rollouts"),
        ):
            if is_so:
                raise CollectorStateError(f"{method}() {reason}")

    def _gather(self, limit_s: float) -> list[Rollout] | None:
        """What a batch is made of; None if all workers left meanwhile, and others may come."""
        self._workers.await_enough()
        try:
            if self._sync:
                return self._pool.gather_all(limit_s)
            return [self._pool.gather_next(limit_s)]
        except BatchTimeout:
            if self._workers.gathers and not self._workers.num_present:
                return None
            raise

    def _note_lags(
        self, batch: TensorDict, rollouts: Sequence[Rollout], lag_of: Callable[[int, int], int]
    ) -> list[list[tuple[int, int]]]:
        lags = count_lags(batch, rollouts, lag_of, self._mask_above)
        self._lag = LagStats.of([count for counts in lags for count in counts])
        return lags

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``."""
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

        A worker that is late or dead, or whose copy arrives damaged, is left out; the handle says
        so. A late worker gets the newest weights as soon as it answers.

        Args:
            policy_or_weights: a module, a TensorDict of parameters or a state dict; with
                ``models``, a dict of these by name. None: the collector's own policy and models;
                if the weight updater gets weights from a server, these are loaded into them first.
                A copy is taken, so training may continue at once.
            worker_ids: the workers to send them to: an int, a list, a slice; a ``torch.device`` or
                several, for workers whose policy is there; "all" or None for all; "last_batch" for
                those whose frames are in the batch that was taken last; "lagging" for those more
                than ``max_weight_update_interval`` versions behind this one.
            wait: return only when it is known of every worker whether it has them. Otherwise return
                at once; if several versions wait to be sent, only the newest is. In sync mode a
                worker collects only when it has the newest version sent to it.

        Returns:
            A handle that says which workers have them: ``done()``, ``wait()``, ``acknowledged``,
            ``left_out``. None if nothing is published, as the policy has no parameters or no worker
            is lagging.

        Raises:
            WeightsError: a key is missing or unknown, has another shape or dtype, or a value that
                ``WeightSync`` refuses. Names the key; nothing was sent.
            ArgumentError, ArgumentTypeError: there is no such worker, or nothing to send. Nothing
                was sent.
            WeightsTimeout: no worker acknowledged in time; names them.
            WorkerLost: a worker had died before.
            WorkerError: no worker could receive them.
        """
        self._check_open()
        # Of what is published to nobody, those who come later would not know.
        self._workers.await_enough()
        with self._stats_recorder.publishing():
            handle = self._publisher.publish(policy_or_weights, worker_ids)
            if wait and handle is not None:
                self._wait_for(handle)
        return handle

    def _wait_for(self, handle: PushHandle) -> None:
        try:
            handle.wait()
        except WorkerLost:
            exit_if_requested()
            # All left meanwhile; who comes next begins with these weights.
            if not self._workers.gathers:
                raise

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._check_open()
        self._pool.seed(seed, static_seed=static_seed, timeout_s=self._faults.batch_timeout_s)
        self._seed = seed, static_seed
        num_slots = max(self._pool.worker_ids, default=-1) + 1
        return env_seed(seed, self._probe.layout.num_envs * num_slots, stream=Stream.NEXT_COLLECTOR)

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]:
        return self._remote_calls.call(method, args, kwargs, worker_ids, timeout_s)

    def _evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        return self._remote_calls.evaluate(num_episodes, worker_ids, deterministic, seed, timeout_s)

    @property
    def evaluations(self) -> list[Evaluation]:
        """Results of the :class:`EvaluationWorkers`, in the order in which they came."""
        return [] if self._evaluators is None else list(self._evaluators.results)

    def _next_traj_id(self) -> int:
        return self._first_traj_id + identity().next_peer * TRAJ_IDS_PER_PEER

    def _resume(self, version: int, first_traj_id: int, frames: int) -> None:
        # All trainers may go on from the state of one.
        own = self._workers.first_traj_id
        first_traj_id = own + first_traj_id % TRAJ_IDS_PER_TRAINER
        self._first_traj_id = first_traj_id
        self._pool.resume(version, first_traj_id, frames, self._faults.batch_timeout_s)

    def shutdown(self) -> None:
        """End and reap the workers; takes little more than ``Faults.stop_timeout_s`` at most."""
        super().shutdown()
        try:
            self._finalizer()
        finally:
            self._end_watch()


def _close(pool: Pool, workers: Workers) -> None:
    try:
        pool.close()
    finally:
        workers.close()
    log.info("where the frames went:\n%s", pool.ledger)
