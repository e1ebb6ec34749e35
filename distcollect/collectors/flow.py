"""Makes batches of the rollouts that a backend collects, one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict
from torch import nn

from distcollect.collectors.batch_format import Rows, WholeTrajectories
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.replay import frames_for
from distcollect.collectors.stacklevel import users_stack_level, without_stop
from distcollect.common import checks
from distcollect.errors import BatchTimeout, CollectorStateError
from distcollect.policy.weight_layout import WeightLayout, state_tensors
from distcollect.pool.publisher import WorkerIds
from distcollect.pool.remote_calls import EnvCall
from distcollect.results import Evaluation, LagStats, Stats
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Layout
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest

# A buffer is filled in the background at its own pace, so the loop may well publish later.
PATIENCE_IN_BACKGROUND = 20


class UnpublishedChanges:
    """Notices changes of the weights, until some are published for the first time.

    Changes are seen by the version counters of tensors, so not those by ``tensor.data``.

    Attributes:
        patience: number of batches that may be delivered with changed weights before it warns.
    """

    def __init__(
        self, module: nn.Module | None, layout: WeightLayout, *, patience: int = 1
    ) -> None:
        """Watch the weights of ``module`` that ``layout`` has."""
        self.patience = patience
        state = state_tensors(module)
        names = [entry.names[0] for entry in layout.entries]
        self._tensors = [state[name] for name in names if name in state]
        self._before = self._versions()
        self._num_batches = 0

    def batch_begins(self) -> None:
        """Warn, once, if more batches than :attr:`patience` were delivered with changed weights."""
        if self._versions() == self._before:
            return
        self._num_batches += 1
        if self._num_batches <= self.patience:
            return
        self._tensors, self._before = [], []  # it warns once
        warnings.warn(
            "the policy's weights were changed, but its copies collect with those that they had "
            "at the start: call collector.update_policy_weights_() after you have changed "
            "them, or pass update_at_each_batch=True",
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


@dataclass(frozen=True)
class Collected:
    """The rollouts of a batch, which a batch is made of.

    Attributes:
        rows: as :meth:`.BatchFormat.shaped` takes them.
        headers: of the W rollouts.
        lag: the lags of their frames.
        settle: to be called once: with None when the user has the frames, with the cause when they
            are lost.
    """

    rows: TensorDict
    headers: Sequence[Header]
    lag: LagStats
    settle: Callable[[str | None], None]


class Backend(Protocol):
    """What steps the envs for a collector: this process, or workers.

    Attributes:
        layout: of each rollout.
        frames_per_batch: frames in each batch.
        hooks: what is called where the envs are stepped.
        unpublished: notices changes of the weights, until some are published; None: nobody looks.
        publishing_outdates: whether newer weights make a batch useless that the user does not have.
    """

    layout: Layout
    frames_per_batch: int
    hooks: Hooks
    unpublished: UnpublishedChanges | None = None
    publishing_outdates: bool = True

    @property
    def policy_version(self) -> int:
        """Version of the newest published weights."""

    @property
    def policy(self) -> Any:
        """The policy as it was given, or made by ``policy_factory``; None: random actions."""

    def collect(self, timeout_s: float, last: Sequence[int]) -> Collected:
        """Collect the rollouts of the next batch.

        Args:
            timeout_s: seconds to wait.
            last: ids of the workers whose frames are in the last batch; empty: there is none.
        """

    def processed(self, batch: TensorDict, options: CollectorOptions) -> TensorDict:
        """Return the batch as it is delivered."""
        return options.batch_format.processed(batch)

    def set_hooks(self, hooks: Hooks) -> None:
        """Call these from now on."""

    def seed(self, seed: int, static_seed: bool) -> int:
        """See :meth:`.DataCollectorBase.set_seed`."""

    def call(self, call: EnvCall, worker_ids: WorkerIds) -> dict[int, list[Any]]:
        """See :meth:`.DataCollectorBase.call`."""

    def evaluate(self, request: EvaluationRequest, worker_ids: WorkerIds) -> Evaluation:
        """See :meth:`.DataCollectorBase.evaluate`."""

    def resume(self, version: int, first_traj_id: int, frames: int) -> None:
        """Continue with this policy_version and traj_id; ``frames`` were collected before."""

    def snapshot(self, known: Stats) -> Stats:
        """Return ``known`` with all other fields filled in."""


@dataclass(eq=False)
class _Ready:
    """A complete batch that the user does not have yet.

    Attributes:
        batch: the batch; None: all frames are collected, and no trajectory is whole.
        collected: what it was made of, if that is still to be settled with it.
    """

    batch: TensorDict | None
    collected: Collected | None = None


class Flow:
    """Gives batches to one thread at a time, within ``with flow:``.

    A batch that the user does not have yet, as the replay buffer raised, comes first the next time.

    Attributes:
        frames: frames collected so far, with padding and with those of the run that was resumed.
        resumed_frames: those of the run that was resumed.
        batches: batches collected.
        workers: ids of the workers whose frames are in the last batch.
        lag: the lags of the last batch.
        total_frames: frames after which it ends; -1: never.
    """

    def __init__(
        self,
        options: CollectorOptions,
        backend: Backend,
        stats_recorder: StatsRecorder,
        begin: Callable[[], None],
    ) -> None:
        """Start without frames; ``begin`` is called before the first batch."""
        self.frames = self.resumed_frames = self.batches = 0
        self.workers: tuple[int, ...] = ()
        self.lag: LagStats | None = None
        self.total_frames = options.rounded_total_frames(backend.frames_per_batch)
        self._options = options
        self._backend = backend
        self._stats_recorder = stats_recorder
        self._begin: Callable[[], None] | None = begin
        self._waiting: deque[_Ready] = deque()
        self._adding: _Ready | None = None  # the one that is added to the replay buffer now
        self._is_closed = False
        self._holder: int | None = None  # the thread that makes a batch
        self._lock = threading.Condition()  # of all that other threads change, and of settling
        self._trajectories: WholeTrajectories | None = None
        if options.trajs_per_batch is not None:
            has_buffer = options.replay_buffer is not None
            self._trajectories = WholeTrajectories(
                None if has_buffer else options.trajs_per_batch,
                pads=options.batch_format.rows is not Rows.CAT,
            )

    # One thread at a time.

    def __enter__(self) -> None:
        """Make a batch on this thread; its time is time in which the caller waits for a batch.

        Raises:
            CollectorStateError: another thread does, or this one does already.
        """
        with self._lock:
            if self._holder == threading.get_ident():
                raise CollectorStateError(
                    "this collector is making a batch already: take the next one not within "
                    "postproc, a hook or the buffer's extend()"
                )
            if self._holder is not None:
                raise CollectorStateError(
                    "another thread waits for a batch of this collector: take all batches on one "
                    "thread and pass them on, or let the threads take turns with a lock of yours"
                )
            self._holder = threading.get_ident()
        try:
            self._stats_recorder.switch_to("assemble")
            if self._begin is not None:
                begin, self._begin = self._begin, None
                begin()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._stats_recorder.switch_to("train")
        with self._lock:
            self._holder = None
            self._lock.notify_all()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the thread that makes a batch; False if it is this one, or takes too long."""
        with self._lock:
            is_other = self._holder != threading.get_ident()
            return is_other and self._lock.wait_for(lambda: self._holder is None, timeout_s)

    # Batches.

    def next(self, timeout_s: float | None) -> TensorDict | None:
        """Return the next batch; None if it went to the replay buffer.

        Raises:
            StopIteration: there is none any more.
        """
        if not self._waiting:
            ready = without_stop(self._made, timeout_s)
            if ready is None:
                raise StopIteration
            self._waiting.append(ready)
        return self._give()

    def give(self, rows: TensorDict, layout: Layout, lag: LagStats) -> TensorDict | None:
        """Give a rollout that is in another trainer's ledger, after all that waits."""
        batch = without_stop(self._processed, rows, layout)
        self._waiting.append(_Ready(batch))
        self.lag = lag
        while len(self._waiting) > 1:
            self._give()
        return self._give()

    def _give(self) -> TensorDict | None:
        ready, buffer = self._waiting[0], self._options.replay_buffer
        if buffer is not None and ready.batch is not None:
            by_step = not self._options.extend_buffer and self._backend.layout.num_envs > 1
            frames = frames_for(ready.batch, buffer, self._rollouts_of, by_step=by_step)
            if frames.shape.numel():  # frames.numel() is 1 for an empty TensorDict
                with self._lock:
                    if self._is_closed:
                        raise CollectorStateError("the collector was shut down meanwhile")
                    self._adding = ready
                try:
                    without_stop(buffer.extend, frames)
                except BaseException:
                    self._adding = None
                    raise
        self._waiting.popleft()
        self._settle(ready, None)
        return ready.batch if buffer is None else None

    def _settle(self, ready: _Ready, cause: str | None) -> None:
        """Settle and count a batch once: :meth:`close`, on another thread, may come before."""
        with self._lock:
            self._adding = None
            collected, ready.collected = ready.collected, None
            if collected is not None:
                collected.settle(cause)
                if cause is None:
                    self.count(collected.headers, collected.lag)

    def _rollouts_of(self, batch: TensorDict) -> list[TensorDict]:
        """The rollouts in a batch; the batch itself where it has another form."""
        options, backend = self._options, self._backend
        if batch.numel() != backend.frames_per_batch:
            return [batch]
        num_envs = backend.layout.num_envs
        return options.batch_format.rollouts(batch, num_envs, options.rollouts_per_batch)

    def _made(self, timeout_s: float | None) -> _Ready | None:
        if (watch := self._backend.unpublished) is not None:
            watch.batch_begins()
        if self._trajectories is not None:
            return self._made_of_trajectories(timeout_s)
        if self.is_over():
            return None
        collected = self._backend.collect(self.limit_s(timeout_s), self.workers)
        try:
            return _Ready(self._processed(collected.rows, self._backend.layout), collected)
        except BaseException:
            collected.settle("given_up")
            raise

    def _processed(self, rows: TensorDict, layout: Layout) -> TensorDict:
        batch = self._options.batch_format.shaped(rows, layout)
        return self._backend.processed(batch, self._options)

    def _made_of_trajectories(self, timeout_s: float | None) -> _Ready | None:
        before, limit_s = self.batches, self.limit_s(timeout_s)
        resets = self._options.reset_at_each_iter
        deadline = time.monotonic() + limit_s
        while True:
            trajectories = self._trajectories
            assert trajectories is not None
            if trajectories.ready:
                batch = self._backend.processed(trajectories.first(), self._options)
                trajectories.drop_first()
                return _Ready(batch)
            if self.is_over():
                if self._options.replay_buffer is None or self.batches == before:
                    self.drop_trajectories()
                    return None
                # Batches were collected, but no whole trajectory for the buffer: one more turn of
                # the caller's loop.
                return _Ready(None)
            left_s = deadline - time.monotonic()
            if self.batches > before and left_s <= 0:
                raise trajectories.too_few(limit_s, resets=resets)
            try:
                collected = self._backend.collect(max(left_s, 0.0), self.workers)
            except BatchTimeout as error:
                if self.batches == before:
                    raise
                raise trajectories.too_few(limit_s, resets=resets) from error
            rows = self._options.batch_format.shaped(collected.rows, self._backend.layout)
            num_before = trajectories.num_whole
            trajectories.add(rows, collected.headers)
            collected.settle(None)
            self.count(collected.headers, collected.lag)
            # With resets in between, a trajectory that one rollout lacks comes in no later one.
            more = trajectories.num_whole > num_before
            if timeout_s is None and (more or not resets):
                deadline = time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Return True if ``total_frames`` are collected; then no time counts any more."""
        is_over = self.total_frames != -1 and self.frames >= self.total_frames
        if is_over:
            self._stats_recorder.end()
        return is_over

    def count(self, headers: Sequence[Header], lag: LagStats) -> None:
        """Count a batch that the user has."""
        self.frames += self._backend.frames_per_batch
        self.batches += 1
        self.workers = tuple(header.worker_id for header in headers)
        self.lag = lag

    def limit_s(self, timeout_s: float | None) -> float:
        """Return the time limit of a call; None: ``Faults.batch_timeout_s``."""
        limits = self._options.fault_limits
        return limits.batch_timeout_s if timeout_s is None else checks.plain(timeout_s)

    # What the user never gets.

    @property
    def abandoned_frames(self) -> int:
        """With ``trajs_per_batch``: frames of trajectories that will never be delivered."""
        return 0 if self._trajectories is None else self._trajectories.abandoned_frames

    def drop(self, cause: str) -> None:
        """Forget the batches that wait for the next call; their frames are lost by ``cause``."""
        with self._lock:
            while self._waiting and self._holder is None:  # else one is on its way to the user now
                self._settle(self._waiting.popleft(), cause)

    def close(self) -> None:
        """Nobody gets anything more; the buffer has the batch that is being added to it."""
        with self._lock:
            self._is_closed = True
            if self._adding is not None:
                # At exit, the pool may be closed before.
                with contextlib.suppress(CollectorStateError):
                    self._settle(self._adding, None)
        self.drop("shut_down")

    def drop_trajectories(self) -> None:
        """Forget the trajectories, whole or not, and the batches that were not delivered."""
        self.drop("given_up")
        if self._trajectories is not None:
            self._trajectories.abandon()
