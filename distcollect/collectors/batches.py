"""Makes batches of rollouts, one after the other, wherever these are collected."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors.background import Background
from distcollect.collectors.batch_format import BatchFormat, WholeTrajectories
from distcollect.collectors.gaps import Gaps
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.replay import frames_for
from distcollect.collectors.user_code import users_stack_level, without_stop
from distcollect.collectors.validation import num_steps
from distcollect.common import checks
from distcollect.common.waiting import wait_for
from distcollect.errors import ArgumentError, BatchTimeout, CollectorStateError, DeadlineError
from distcollect.launch.cpu_placement import load
from distcollect.policy.normalize import Statistics
from distcollect.policy.weight_layout import (
    WeightLayout,
    named_tensors,
    published,
    state_tensors,
)
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.pool.remote_calls import EnvCall
from distcollect.results import Evaluation, LagStats, LedgerReport, Stats
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest
from distcollect.weights.push_handle import PushHandle

# Batches: a loop may well publish at every tenth only, or much later than a thread collects.
_PATIENCE = 20
_with_buffer: weakref.WeakSet[Backend] = weakref.WeakSet()  # those that fill a replay buffer


class UnpublishedChanges:
    """Notices changes of the weights, until some are published for the first time.

    Changes are seen by the version counters of tensors, so not those by ``tensor.data``.
    """

    def __init__(self, module: nn.Module | None, layout: WeightLayout) -> None:
        """Watch the weights of ``module`` that ``layout`` has."""
        state = state_tensors(module)
        names = [entry.names[0] for entry in layout.entries]
        self._tensors = [state[name] for name in names if name in state]
        self._before = self._versions()
        self._num_batches = 0

    def batch_begins(self) -> None:
        """Warn, once, if many batches were delivered with changed weights."""
        if self._versions() == self._before:
            return
        self._num_batches += 1
        if self._num_batches <= _PATIENCE:
            return
        self._tensors, self._before = [], []  # it warns once
        warnings.warn(
            f"the policy's weights were changed, but its copies have collected {_PATIENCE} batches "
            "with those that they had at the start: call collector.update_policy_weights_() after "
            "you have changed them, or pass update_at_each_batch=True, if you don't call start()",
            UserWarning,
            stacklevel=users_stack_level(),
        )

    def _versions(self) -> list[int]:
        return [t._version for t in self._tensors if not t.is_inference()]  # noqa: SLF001 - torch's


class Hooks(NamedTuple):
    """Functions of the user's, called where envs are stepped; None: there is nothing to call.

    Attributes:
        pre_collect: called before each batch.
        post_collect: called with each batch.
    """

    pre_collect: Callable[[], Any] | None
    post_collect: Callable[[TensorDict], Any] | None


@dataclass(eq=False)
class Batch:
    """The frames of a batch, until the user has them.

    Attributes:
        frames: of W rollouts, as :meth:`.BatchFormat.shaped` takes them, and then as they are
            delivered; None: all frames are collected, and no trajectory is whole.
        headers: of the rollouts; none for whole trajectories, whose frames were counted before.
        lag: the lags of the frames.
        age: their ages.
        settle: to be called once: with None when the user has the frames, with the cause when they
            are lost; None: that is done.
    """

    frames: TensorDict | None
    headers: Sequence[Header] = ()
    lag: LagStats | None = None
    age: LagStats | None = None
    settle: Callable[[str | None], None] | None = None


class Backend(ABC):
    """Steps envs for a collector, in this process or in workers, and makes batches of the rollouts.

    It gives batches to one thread at a time, within ``with backend:``. A batch that the user does
    not have, as the replay buffer raised, comes first the next time.

    Attributes:
        layout: of each rollout.
        frames_per_batch: frames in each batch.
        hooks: what is called where the envs are stepped.
        unpublished: notices changes of the weights, until some are published; None: nobody looks.
        publishing_outdates: whether newer weights make a batch useless that the user does not have.
        begin: called before the first batch.
        on_failure: called when the run can't go on, after the call that raises why.
        frames: frames collected so far, with padding and with those of the run that was resumed.
        resumed_frames: those of the run that was resumed.
        batches: batches collected.
        last_workers: ids of the workers whose frames are in the last batch; empty: there is none.
        rests: ids of the trajectories in the last rollouts whose beginning is missing.
        lag: the lags of the last batch.
        age: its ages.
        statistics: those that normalise batches; None: nothing does.
        evaluations: those of workers that only evaluate, in the order in which they came.
    """

    layout: Layout
    frames_per_batch: int
    unpublished: UnpublishedChanges | None = None
    publishing_outdates: bool = True
    begin: Callable[[], None] | None = None
    _load: float | None = None
    on_failure: Callable[[], object]
    statistics: Statistics | None = None
    evaluations: Sequence[Evaluation] = ()

    def __init__(self, options: CollectorOptions, stats_recorder: StatsRecorder) -> None:
        """Start without frames."""
        self.hooks = Hooks(options.pre_collect_hook, options.post_collect_hook)
        self.frames = self.resumed_frames = self.batches = 0
        self.last_workers: tuple[int, ...] = ()
        self.lag: LagStats | None = None
        self.age: LagStats | None = None
        self._options = options
        self._format = BatchFormat(options)
        self._gaps = Gaps(takes_masked=options.replay_buffer is None)
        self.rests: set[int] = set()
        self._stats_recorder = stats_recorder
        self._given: Weights | None = None  # what was published last; None: the collector's own
        self._waiting: Batch | None = None  # that the replay buffer did not take
        self._adding: Batch | None = None  # the one that is added to the replay buffer now
        self._is_closed = self._is_searched = False
        self._background: Background | None = None
        self._holder: int | None = None  # the thread that makes a batch
        self._lock = threading.Condition()  # of all that other threads change, and of settling
        self._trajectories: WholeTrajectories | None = None
        if options.replay_buffer is not None:
            _with_buffer.add(self)
        if options.trajs_per_batch is not None:
            self._trajectories = WholeTrajectories(options)

    def _load_of(self, num_cores: int, known: Stats) -> float:
        """See :attr:`.Stats.load`; after the end it stays as it was then."""
        if self._load is None or not known.ended:
            self._load = load(num_cores, torch.get_num_threads())
        return self._load

    def _use_layout(self, layout: Layout) -> None:
        """Make batches of rollouts of this layout.

        Raises:
            ArgumentError: ``frames_per_batch`` can't be split over the envs, or frames of this
                layout can't be normalised, or have an entry that would be replaced by another.
        """
        self.layout = layout
        added = {*getattr(self._options.replay_buffer, "added_to_samples", ())}
        added |= {"policy_version"} if self._options.track_policy_version else set()
        if taken := sorted(added.intersection(leaf.key[0] for leaf in layout.root)):
            raise ArgumentError(
                f"frames have {taken} of the env or the policy, and track_policy_version or the "
                "replay buffer would replace that: rename it"
            )
        if (normalizer := self._options.normalizer) is not None:
            self.statistics = Statistics(normalizer, layout, raw=self._options.records_raw)
        options, num_envs = self._options, layout.num_envs
        self._num_steps = num_steps(options, num_envs, rounds_up=layout.is_torchrl)
        self.frames_per_batch = self._num_steps * num_envs * options.rollouts_per_batch

    # What this process and workers do each in their own way.

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the newest published weights."""

    @property
    @abstractmethod
    def policy(self) -> Any:
        """The policy as it was given, or made by ``policy_factory``; None: random actions."""

    @property
    def ledger(self) -> LedgerReport:
        """See :attr:`.DataCollectorBase.ledger`."""
        if (trajectories := self._trajectories) is None:
            return self._ledger
        with self._lock:
            return trajectories.settled(self._ledger)

    @property
    @abstractmethod
    def _ledger(self) -> LedgerReport:
        """The same, of rollouts: with ``trajs_per_batch``, those that were taken apart count."""

    @abstractmethod
    def _collect(self, timeout_s: float) -> Batch:
        """Collect the rollouts of the next batch, within ``timeout_s`` seconds."""

    @abstractmethod
    def _publish(
        self, weights: Weights | None, worker_ids: WorkerIds, *, wait: bool
    ) -> PushHandle | None:
        """See :meth:`.DataCollectorBase.update_policy_weights_`."""

    @abstractmethod
    def set_hooks(self, hooks: Hooks) -> None:
        """Call these from now on."""

    @abstractmethod
    def seed(self, seed: int, static_seed: bool) -> int:
        """See :meth:`.DataCollectorBase.set_seed`."""

    @abstractmethod
    def resume(self, version: int, first_traj_id: int) -> None:
        """Continue with this policy_version and traj_id, and with :attr:`resumed_frames`."""

    @abstractmethod
    def call(self, call: EnvCall, worker_ids: WorkerIds) -> dict[int, list[Any]]:
        """See :meth:`.DataCollectorBase.call`."""

    @abstractmethod
    def evaluate(self, request: EvaluationRequest, worker_ids: WorkerIds) -> Evaluation:
        """See :meth:`.DataCollectorBase.evaluate`."""

    @abstractmethod
    def _snapshot(self, known: Stats) -> Stats:
        """Return ``known`` with all other fields filled in."""

    def stats(self, collector: str, *, ended: bool) -> Stats:
        """Return statistics; ``collector``: the name of its class."""
        known = self._snapshot(
            Stats(
                collector=collector,
                frames=self.frames,
                resumed_frames=self.resumed_frames,
                total_frames=self.total_frames,
                policy_version=self.policy_version,
                ended=ended,
                num_batches=self.batches,
                frames_per_batch=self.frames_per_batch,
            )
        )
        if (apart := self._trajectories) is None:
            return known
        undelivered = apart.held.total() + apart.abandoned.total()
        return replace(known, delivered=known.delivered - undelivered)

    # One thread at a time.

    def __enter__(self) -> None:
        """Make a batch on this thread; its time is time in which the caller waits for a batch.

        Raises:
            CollectorStateError: another thread does, or this one does already.
        """
        if self._has_turn:
            raise CollectorStateError(
                "this collector is making a batch already: take the next one not within "
                "postproc, a hook or the buffer's extend()"
            )
        self._begin_turn()
        try:
            self._stats_recorder.switch_to("assemble")
            if self.begin is not None:
                begin, self.begin = self.begin, None
                begin()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._stats_recorder.switch_to("train")
        self._end_turn()

    @property
    def _has_turn(self) -> bool:
        return self._holder == threading.get_ident()

    def _begin_turn(self) -> None:
        with self._lock:
            if self._holder is not None:
                raise CollectorStateError(
                    "another thread waits for a batch of this collector, or uses its envs and "
                    "policy: take all batches on one thread and pass them on, or let the threads "
                    "take turns with a lock of yours"
                )
            self._holder = threading.get_ident()

    def _end_turn(self) -> None:
        with self._lock:
            self._holder = None
            if self._is_closed and self._trajectories is not None:
                self._trajectories.abandon()
            self._lock.notify_all()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the thread that makes a batch; False if it is this one, or takes too long."""
        with self._lock:
            return not self._has_turn and self._lock.wait_for(
                lambda: self._holder is None, timeout_s
            )

    # Batches.

    def next(self, timeout_s: float | None) -> TensorDict | None:
        """Return the next batch; None if it went to the replay buffer.

        Raises:
            StopIteration: there is none any more.
        """
        batch = self._waiting or without_stop(self._made, timeout_s)
        if batch is None:
            raise StopIteration
        return self._give(batch)

    def _give(self, batch: Batch) -> TensorDict | None:
        self._waiting, buffer = batch, self._options.replay_buffer
        if buffer is not None and batch.frames is not None and batch.frames.shape.numel():
            by_step = not self._options.extend_buffer and self.layout.num_envs > 1
            frames = frames_for(batch.frames, buffer, self._rollouts_of, by_step=by_step)
            with self._lock:
                if self._is_closed:
                    raise CollectorStateError("the collector was shut down meanwhile")
                self._adding = batch
            try:
                without_stop(buffer.extend, frames)
            except BaseException:
                self._adding = None
                raise
        self._waiting = None
        self._settle(batch, None)
        return batch.frames if buffer is None else None

    @contextlib.contextmanager
    def adding_nothing(self, timeout_s: float) -> Iterator[None]:
        """Within, nothing is added to the replay buffer; what is being added comes first.

        Raises, on entering:
            DeadlineError: that took longer than ``timeout_s``.
        """
        with self._lock:
            is_own = self._has_turn  # a hook, or the user's buffer
            if not wait_for(self._lock, lambda: is_own or self._adding is None, timeout_s):
                raise DeadlineError(
                    f"the replay buffer can't be saved: its extend() did not end within "
                    f"{timeout_s:g} s. If it waits for samples, use distcollect.RateLimited instead"
                )
            yield

    def _settle(self, batch: Batch, cause: str | None) -> None:
        """Settle and count a batch once: :meth:`close`, on another thread, may come before."""
        with self._lock:
            self._adding = None
            settle, batch.settle = batch.settle, None
            if settle is not None:
                settle(cause)
                if self.statistics is not None and batch.headers:
                    self.statistics.settle(is_lost=cause is not None)
                if cause is None and batch.headers:
                    self._gaps.delivered()
                    self._count(batch.headers, batch.lag, batch.age)

    def _rollouts_of(self, batch: TensorDict) -> list[TensorDict]:
        """The rollouts in a batch; the batch itself where it has another form."""
        if batch.numel() != self.frames_per_batch:
            return [batch]
        return self._format.rollouts(batch, self._options.rollouts_per_batch)

    def _made(self, timeout_s: float | None) -> Batch | None:
        if (watch := self.unpublished) is not None:  # once: another thread may publish now
            watch.batch_begins()
        if self._trajectories is not None:
            return self._made_of_trajectories(self._trajectories, timeout_s)
        if self.is_over():
            return None
        batch = self._collect(self.limit_s(timeout_s))
        with self._given_up_if_it_fails(batch):
            batch.frames = self._processed(self._shaped(batch))
        return batch

    @contextlib.contextmanager
    def _given_up_if_it_fails(self, batch: Batch) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._settle(batch, "given_up")
            raise

    def _assembled(self, layout: Layout, rollouts: Sequence[Rollout]) -> TensorDict:
        """Return a batch of these rollouts, for :meth:`.BatchFormat.shaped`."""
        return assemble(
            layout,
            rollouts,
            mask=self._options.has_mask,
            compact=self._options.compact_obs,
            device=self._options.devices.storing,
            shape=self._format.shape(layout, rollouts),
        )

    def _shaped(self, batch: Batch) -> TensorDict:
        """Return the frames of a new batch in its shape, and normalised."""
        assert batch.frames is not None
        self.rests = self._gaps.take(batch.frames, batch.headers, self.layout.num_envs)
        if self.statistics is not None:
            self.statistics.take(batch.frames, batch.headers)
        return self._format.shaped(batch.frames, self.layout)

    def normalized(self, frames: TensorDict) -> TensorDict:
        """See :meth:`.DataCollectorBase.normalize`."""
        if self.statistics is None:
            raise ArgumentError(
                "normalize(): there are no statistics: pass normalize=distcollect.Normalize() "
                "when you make the collector"
            )
        return self.statistics.normalized(frames)

    def load_statistics(self, state: Mapping[str, Any]) -> bool:
        """Load the statistics in a collector's state; True if they are to be published now.

        Raises:
            ArgumentError: this collector has none, or of other observations.
        """
        if (saved := state.get("normalizer")) is None:
            return False
        if self.statistics is None:
            raise ArgumentError(
                "the state has statistics of observations: make the collector with the normalize= "
                "that it was saved with"
            )
        self.statistics.load_state_dict(saved)
        only_user_has_weights = self.policy is None and self._options.factories
        return bool(saved["is_used"]) and not only_user_has_weights

    def _completed(self, weights: Any) -> Any:
        """Return weights that the user gave, with the statistics that are published with them."""
        if self.statistics is None:
            return weights
        has_models = bool(self._options.named_models)
        return self.statistics.completed(weights, has_models=has_models)

    def _processed(self, frames: TensorDict) -> TensorDict:
        """Return the frames of a batch as they are delivered."""
        return self._format.processed(frames)

    def _made_of_trajectories(
        self, trajectories: WholeTrajectories, timeout_s: float | None
    ) -> Batch | None:
        before, limit_s = self.batches, self.limit_s(timeout_s)
        deadline = time.monotonic() + limit_s
        while not trajectories.ready:
            if self.is_over():
                if self._options.replay_buffer is None or self.batches == before:
                    self.drop_trajectories()
                    return None
                # Batches were collected, but no whole trajectory for the buffer: one more turn of
                # the caller's loop.
                return Batch(None)
            left_s = deadline - time.monotonic()
            if self.batches > before and left_s <= 0:
                raise trajectories.too_few(limit_s)
            try:
                batch = self._collect(max(left_s, 0.0))
            except BatchTimeout as error:
                if self.batches == before:
                    raise
                raise trajectories.too_few(limit_s) from error
            num_before = trajectories.num_whole
            with self._given_up_if_it_fails(batch):
                rows = self._shaped(batch)
            with self._lock:
                trajectories.add(rows, batch.headers, self.rests)
                self._settle(batch, None)
            # With resets in between, a trajectory that one rollout lacks comes in no later one.
            more = trajectories.num_whole > num_before
            if timeout_s is None and (more or not self._options.reset_at_each_iter):
                deadline = time.monotonic() + limit_s

        def settle(cause: str | None) -> None:
            if cause is None:
                trajectories.drop_first()

        return Batch(self._processed(trajectories.first()), settle=settle)

    def is_over(self) -> bool:
        """Return True if ``total_frames`` are collected; then no time counts any more."""
        is_over = self.total_frames != -1 and self.frames >= self.total_frames
        if is_over:
            self._stats_recorder.end()
        return is_over

    def _count(self, headers: Sequence[Header], lag: LagStats | None, age: LagStats | None) -> None:
        """Count a batch that the user has."""
        self.frames += self.frames_per_batch
        self.batches += 1
        self.last_workers = tuple(header.worker_id for header in headers)
        self.lag, self.age = lag, age

    @property
    def total_frames(self) -> int:
        """Frames after which it ends; -1: never."""
        return self._options.rounded_total_frames(self.frames_per_batch)

    def limit_s(self, timeout_s: float | None) -> float:
        """Return the time limit of a call; None: ``Faults.batch_timeout_s``.

        Raises:
            ArgumentError, ArgumentTypeError: it is none.
        """
        if timeout_s is None:
            return self._options.fault_limits.batch_timeout_s
        return checks.seconds(f"timeout_s={timeout_s!r}", timeout_s)

    # What the user asks for between two batches.

    def publish(
        self, weights: Weights | None, worker_ids: WorkerIds, *, wait: bool
    ) -> PushHandle | None:
        """Publish weights; a batch that the user does not have may be too old then."""
        self._warn_if_nothing_to_publish()
        with self._stats_recorder.publishing():
            version = self.policy_version
            self.unpublished = None  # the user knows what to call
            if self._stats_recorder.best:
                self._given = weights
            try:
                return self._publish(weights, worker_ids, wait=wait)
            finally:
                if self.publishing_outdates and self.policy_version != version:
                    self.drop("given_up")

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that the user has, by name: the collector's own, and those given."""
        for weights in (published(self.policy, self._options.published_models), self._given):
            if weights is not None:
                yield from named_tensors(self._completed(weights)).items()

    def _warn_if_nothing_to_publish(self) -> None:
        if self._is_searched or self.statistics is not None:
            return
        self._is_searched = True  # it warns once
        policy = self.policy
        if policy is not None and published(policy, self._options.named_models) is None:
            warnings.warn(
                f"no weights were found in the policy {policy!r}: none are published, nor copied "
                "by start(). If it has some, pass a module that has them, or models=. If it has "
                "none, there is nothing to publish: leave out update_policy_weights_() and "
                "update_at_each_batch",
                UserWarning,
                stacklevel=users_stack_level(),
            )

    def use(self, background: Background) -> None:
        """Collect only on this thread from now on, which was not started yet."""
        self._warn_if_nothing_to_publish()
        self._background = background

    # What the user never gets.

    @property
    def abandoned_frames(self) -> int:
        """With ``trajs_per_batch``: frames of trajectories that will never be delivered."""
        return 0 if self._trajectories is None else self._trajectories.abandoned.total()

    def drop(self, cause: str) -> None:
        """Forget the batch that waits for the next call; its frames are lost by ``cause``."""
        with self._lock:
            # With a holder, it is on its way to the user now.
            if self._waiting is not None and self._holder is None:
                self._settle(self._waiting, cause)
                self._waiting = None

    def drop_trajectories(self, cause: str = "given_up") -> None:
        """Forget the trajectories, whole or not, and a batch that was not delivered."""
        self.drop(cause)
        with self._lock:
            # Another thread that makes a batch may be adding to them now.
            is_free = self._holder is None or self._has_turn
            if self._trajectories is not None and is_free:
                self._trajectories.abandon()

    def close(self, *, close_envs: bool, failed: bool = False) -> None:
        """End: nobody gets anything more. The buffer has the batch that is being added to it.

        It is called again if an exception broke it off. ``close_envs``: as of
        :meth:`.DataCollectorBase.shutdown`. ``failed``: it ends because of an error.
        """
        with self._lock:
            self._is_closed = True
            if self._adding is not None:
                # At exit, the pool may be closed before.
                with contextlib.suppress(CollectorStateError):
                    self._settle(self._adding, None)
        self._gaps.free_ids()
        self.drop_trajectories("shut_down")


@contextlib.contextmanager
def adding_nothing(timeout_s: float) -> Iterator[None]:
    """Within, no collector of this process adds to a replay buffer.

    Raises, on entering:
        DeadlineError: an ``extend()`` took longer than ``timeout_s``.
    """
    with contextlib.ExitStack() as all_of_them:
        for backend in sorted(_with_buffer, key=id):  # as every thread does
            all_of_them.enter_context(backend.adding_nothing(timeout_s))
        yield
