"""Delivers batches one by one to a loop."""

from __future__ import annotations

import enum
import functools
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from tensordict import TensorDict

from distcollect.collectors.batch_format import Rows, WholeTrajectories
from distcollect.collectors.finalizer import Finalizer
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.progress import Collected, Progress, Ready
from distcollect.collectors.replay import (
    ReplayBuffer,
    check_can_hold,
    frames_for,
)
from distcollect.collectors.stacklevel import without_stop
from distcollect.collectors.unpublished import UnpublishedChanges
from distcollect.common import checks, tensor_cache
from distcollect.common.forks import Owner
from distcollect.errors import ArgumentTypeError, BatchTimeout, CollectorStateError
from distcollect.results import Stats
from distcollect.rollout.layout import Layout
from distcollect.telemetry.monitor import MonitorThread
from distcollect.telemetry.recorder import StatsRecorder

log = logging.getLogger(__name__)

# For a thread that was told to end, and whose workers are gone.
JOIN_TIMEOUT_S = 10.0
# For the last statistics to be written.
_MONITOR_LIMIT_S = 60.0

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CollectorState(enum.Enum):
    """What a collector does; it goes from the first to the last.

    Attributes:
        OPEN: it collects, when a batch is requested or in the background.
        SHUT_DOWN: nothing more; it releases what it held.
    """

    OPEN = "open"
    SHUT_DOWN = "shut down"


class _Batches(Iterator[TensorDict]):
    """Iterates over a collector. Unlike a generator it goes on after an exception."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream

    def __next__(self) -> TensorDict:
        return self._stream.next()


def timed(method: _Method) -> _Method:
    """Count the time of a collector's method as time in which the caller waits for a batch.

    It may call functions of the user's; these must not take a batch of the collector.
    """

    @functools.wraps(method)
    def wrapper(self: BatchStream, *args: Any, **kwargs: Any) -> Any:
        recorder, monitor = self._stats_recorder, self._monitor_thread
        try:
            self._busy = threading.get_ident()
            recorder.switch_to("assemble")
            if not monitor.has_begun:
                monitor.begin(_weakly(self.stats))
            return without_stop(method, self, *args, **kwargs)
        except BaseException:
            self._leave()
            raise
        finally:
            self._busy = None  # first, as what follows may be interrupted
            recorder.switch_to("train")

    return cast("_Method", wrapper)


def _do_nothing(frames: TensorDict) -> None:
    pass


def _close_monitor(monitor: MonitorThread, last_stats: Sequence[Stats]) -> None:
    monitor.close(last_stats[-1] if last_stats else None)


def _weakly(method: Callable[[], Stats]) -> Callable[[], Stats | None]:
    """Calls ``method``; returns None once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> Stats | None:
        found = reference()
        return None if found is None else found()

    return call


class Hooks(NamedTuple):
    """Functions of the user's that this process calls; None: there is nothing to call.

    Attributes:
        pre_collect: called before each batch.
        post_collect: called with each batch.
    """

    pre_collect: Callable[[], Any] | None
    post_collect: Callable[[TensorDict], Any] | None


class BatchStream(ABC):
    """Collects one batch after the other, until ``total_frames`` are collected or it is shut down.

    Attributes:
        frames_per_batch: frames in each batch.
        total_frames: frames after which it ends, a multiple of ``frames_per_batch``; -1: endless.
        requested_frames_per_batch: ``frames_per_batch`` as it was given; with TorchRL's envs it may
            be lower than the number of frames in a batch.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose own ``rollout()`` or ``iterator()`` a loop would not call.

        Raises:
            ArgumentTypeError: it has one of these methods.
        """
        super().__init_subclass__(**kwargs)
        for name in ("rollout", "iterator"):
            if getattr(cls, name) is not getattr(BatchStream, name):  # its own, or of a mixin
                raise ArgumentTypeError(
                    f"class {cls.__name__}: its {name}() would not be called by a loop over the "
                    "collector. To change batches, pass postproc= or override next()"
                )

    def __init__(self, options: CollectorOptions) -> None:
        """Open what shows and records the run.

        Args:
            options: the arguments, checked.

        Raises:
            ArgumentError: a file or a port of the ``monitor`` can't be opened.
        """
        self.requested_frames_per_batch = options.frames_per_batch
        self.frames_per_batch = options.frames_per_batch
        self.total_frames = options.rounded_total_frames(options.frames_per_batch)
        self._options = options
        self._state = CollectorState.OPEN
        self._owner = Owner()
        self._hooks = Hooks(options.pre_collect_hook, options.post_collect_hook)
        self._progress = Progress()
        self._entering = threading.Lock()
        self._caller: int | None = None  # the thread that waits for a batch, or is about to get it
        self._busy: int | None = None  # the thread that may call the user's functions now
        if options.trajs_per_batch is not None:
            has_buffer = options.replay_buffer is not None
            self._progress = Progress(
                trajectories=WholeTrajectories(
                    None if has_buffer else options.trajs_per_batch,
                    pads=options.batch_format.rows is not Rows.CAT,
                )
            )
        self._closes_envs = True
        self._unpublished: UnpublishedChanges | None = None  # the weights are not watched
        self._monitor_thread = MonitorThread(options.monitor, options.trace)
        self._stats_recorder = StatsRecorder(
            trace=self._monitor_thread.trace, metrics=self._monitor_thread.metrics
        )
        self._is_released = False
        self._last_stats: list[Stats] = []  # what the monitor is closed with
        self._close_monitor = Finalizer(
            self, partial(_close_monitor, self._monitor_thread, self._last_stats), _MONITOR_LIMIT_S
        )
        try:
            self._open()
        except BaseException:
            # Now, since the error keeps the collector for as long as somebody holds the error, as
            # notebooks do with the last one; a port of Prometheus would be taken until then.
            self._close_monitor()
            raise
        try:
            check_can_hold(options.replay_buffer, self._layout)
        except BaseException:
            self.shutdown()
            raise

    @abstractmethod
    def _open(self) -> None:
        """Make what steps the envs. If it raises, nothing is left open."""

    @property
    def frames(self) -> int:
        """Frames collected so far, with padding and with those of the run that was resumed."""
        return self._progress.frames

    def _count_frames(self, frames_per_batch: int) -> None:
        """Set the number of frames in each batch, once the number of envs is known."""
        self.frames_per_batch = frames_per_batch
        self.total_frames = self._options.rounded_total_frames(frames_per_batch)

    def __len__(self) -> int:
        """Number of batches in ``total_frames``, with those that were delivered already.

        With ``trajs_per_batch``: number of times that ``frames_per_batch`` frames are collected.

        Raises:
            TypeError: the collector is endless.
        """
        if self.total_frames == -1:
            raise ArgumentTypeError(
                "len(): this collector is endless: give it total_frames, or count the batches"
            )
        return self.total_frames // self.frames_per_batch

    def __bool__(self) -> bool:
        """True: a collector without a length is not empty."""
        return True

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._state is CollectorState.SHUT_DOWN

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The buffer to which batches are added; None: they are delivered."""
        return self._options.replay_buffer

    @property
    def init_random_frames(self) -> int:
        """Number of frames at the start that have random actions."""
        return self._options.random_frames

    @property
    def abandoned_frames(self) -> int:
        """With ``trajs_per_batch``: frames of trajectories that will never be delivered."""
        trajectories = self._progress.trajectories
        return 0 if trajectories is None else trajectories.abandoned_frames

    def iterator(self) -> Iterator[TensorDict]:
        """The same as iterating over the collector."""
        return iter(self)

    def rollout(self) -> TensorDict:
        """The same as :meth:`next`: its frames count towards ``total_frames``."""
        return self.next()

    def __iter__(self) -> Iterator[TensorDict]:
        """Batches until ``total_frames`` are collected; a second loop continues."""
        return _Batches(self)

    def __next__(self) -> TensorDict:
        """The same as :meth:`next`, so that ``next(collector)`` works."""
        return self.next()

    def next(self, timeout_s: float | None = None) -> TensorDict:
        """Wait for the next batch.

        Args:
            timeout_s: seconds to wait; None: ``Faults.batch_timeout_s``, with ``trajs_per_batch``
                for each of the rollouts that a batch needs, and with ``reset_at_each_iter`` too for
                the next whole trajectory.

        Returns:
            The batch; None if it went to the ``replay_buffer``.

        Raises:
            StopIteration: ``total_frames`` are collected.
            BatchTimeout: there was no batch in time; names the workers that it waited for.
            EnvError: an env raised too often; names the worker.
            PolicyError: the policy raised; names the worker.
            WorkerLost: fewer workers are left than ``Faults.min_workers``; says why.
            CollectorStateError: after :meth:`shutdown`, after :meth:`start`, while another thread
                waits for a batch of this collector, or within another call of it, as from
                ``postproc``.
            ArgumentError: ``postproc``, a hook or the buffer raised StopIteration. Their other
                exceptions pass through.
        """
        self._check_delivers()
        self._enter()
        try:
            if self._prepare(timeout_s):
                return self._hand_out()
        except BaseException:
            self._leave()
            raise
        self._leave()
        raise StopIteration

    @timed
    def _prepare(self, timeout_s: float | None) -> bool:
        """Have the next batch ready, with ``postproc``; False if there is none any more."""
        ready = self._progress.ready
        if ready is not None and ready.stamp == self._stamp():
            return True  # an exception kept it from reaching the user
        if (watch := self._unpublished) is not None:
            watch.batch_begins()
        if self._progress.trajectories is not None:
            return self._prepare_trajectories(timeout_s)
        if self._is_over():
            return False
        collected = self._next(self._limit_s(timeout_s))
        batch = self._options.batch_format.shaped(collected.rows, self._layout)
        self._finish(batch, self._after(collected))
        return True

    def _set_hooks(self, hooks: Hooks) -> None:
        """Call these from now on."""
        self._hooks = hooks

    def _processed(self, batch: TensorDict) -> TensorDict:
        """The batch as it is delivered."""
        return self._options.batch_format.processed(batch)

    def _drop_trajectories(self) -> None:
        """Forget the trajectories, whole or not, and the batch that were not delivered."""
        trajectories = self._progress.trajectories
        self._progress = replace(
            self._progress,
            ready=None,
            trajectories=None if trajectories is None else trajectories.abandoned(),
        )

    def _rollouts_of(self, batch: TensorDict) -> list[TensorDict]:
        """The rollouts in a batch; the batch itself where it has another form."""
        if batch.numel() != self.frames_per_batch:
            return [batch]
        options = self._options
        return options.batch_format.rollouts(
            batch, self._layout.num_envs, options.rollouts_per_batch
        )

    def _finish(self, batch: TensorDict, then: Progress) -> None:
        stamp = self._stamp()
        if self._options.postproc is not None:
            # It may change the batch in place, so the batch can't be made from the rollouts again.
            self._let_go(then)
        batch = self._processed(batch)
        self._progress = replace(self._progress, ready=Ready(batch, then, stamp))

    def _hand_out(self) -> TensorDict:
        """Return the batch that is ready, or None if it went to the replay buffer."""
        ready = self._progress.ready
        assert ready is not None
        self._let_go(ready.then)
        if self._options.replay_buffer is None:
            return self._given(ready)
        self._busy = threading.get_ident()
        try:
            without_stop(self._add, ready)
        finally:
            self._busy = None
        return cast("TensorDict", None)

    def _given(self, ready: Ready, frames: TensorDict | None = None) -> TensorDict:
        """The batch, or its ``frames``, which is the caller's with this very return."""
        value = cast("TensorDict", ready.batch if frames is None else frames)
        # Nothing is called from here on, so no signal is handled before the caller has it.
        self._progress, self._caller = ready.then, None
        return value

    def _add(self, ready: Ready) -> None:
        """Add the batch to the replay buffer; if that raises, the next call adds it again."""
        options, before = self._options, self._progress
        assert options.replay_buffer is not None
        if ready.batch is None:
            self._given(ready)
            return
        by_step = not options.extend_buffer and self._layout.num_envs > 1
        frames = frames_for(ready.batch, options.replay_buffer, self._rollouts_of, by_step=by_step)
        # Not frames.numel(), which is 1 for an empty TensorDict.
        extend = options.replay_buffer.extend if frames.shape.numel() else _do_nothing
        try:
            # The buffer has the frames from here on, unless it raises.
            extend(self._given(ready, frames))
        except BaseException as error:
            trace = error.__traceback__
            # Python raises Ctrl-C in this very frame just after the buffer has returned.
            if not isinstance(error, KeyboardInterrupt) or (trace and trace.tb_next):
                self._progress = before
            raise

    def _prepare_trajectories(self, timeout_s: float | None) -> bool:
        """See :meth:`_prepare`, for ``trajs_per_batch``."""
        progress, before = self._progress, self._progress.batches
        limit_s, resets = self._limit_s(timeout_s), self._options.reset_at_each_iter
        deadline = time.monotonic() + limit_s
        while True:
            trajectories = progress.trajectories
            assert trajectories is not None
            if trajectories.ready:
                batch, rest = trajectories.taken()
                self._finish(batch, replace(progress, trajectories=rest))
                return True
            if self._is_over():
                if self._options.replay_buffer is None or progress.batches == before:
                    self._drop_trajectories()
                    return False
                # Batches were collected, but no whole trajectory for the buffer: one more turn of
                # the caller's loop.
                self._progress = replace(progress, ready=Ready(None, progress, self._stamp()))
                return True
            left_s = deadline - time.monotonic()
            if progress.batches > before and left_s <= 0:
                raise trajectories.too_few(limit_s, resets=resets)
            try:
                collected = self._next(max(left_s, 0.0))
            except BatchTimeout as error:
                if progress.batches == before:
                    raise
                raise trajectories.too_few(limit_s, resets=resets) from error
            num_before = trajectories.num_whole
            rows = self._options.batch_format.shaped(collected.rows, self._layout)
            trajectories = trajectories.with_rollouts(rows, collected.headers)
            progress = replace(self._after(collected), trajectories=trajectories)
            self._progress = progress
            # With resets in between, a trajectory that one rollout lacks comes in no later one.
            if timeout_s is None and (trajectories.num_whole > num_before or not resets):
                deadline = time.monotonic() + limit_s

    def _is_over(self) -> bool:
        """Whether ``total_frames`` are collected; then no time counts any more."""
        is_over = self.total_frames != -1 and self._progress.frames >= self.total_frames
        if is_over:
            self._stats_recorder.end()
        return is_over

    def _after(self, collected: Collected) -> Progress:
        """What has been collected, once the user has this."""
        progress = self._progress
        return replace(
            progress,
            frames=progress.frames + self.frames_per_batch,
            batches=progress.batches + 1,
            claimed=max(progress.claimed, collected.number),
            workers=tuple(header.worker_id for header in collected.headers),
            lag=collected.lag,
            ready=None,
        )

    def _let_go(self, then: Progress) -> None:  # noqa: B027 - some have nothing to do
        """Keep nothing of the rollouts of the next batch, which may share memory with it."""

    @abstractmethod
    def _stamp(self) -> object:
        """Changes with everything that makes a batch that was not returned yet useless."""

    def _limit_s(self, timeout_s: float | None) -> float:
        limits = self._options.fault_limits
        return limits.batch_timeout_s if timeout_s is None else checks.plain(timeout_s)

    def _check_open(self) -> None:
        if not self._owner.is_here:
            raise CollectorStateError(
                f"this process is a forked child of process {self._owner.pid}, which has the "
                "collector; only that process can use it"
            )
        if self._state is CollectorState.SHUT_DOWN:
            raise CollectorStateError("the collector was shut down: make a new one")

    def _check_delivers(self) -> None:
        self._check_open()

    def _enter(self) -> None:
        """Wait for a batch on this thread, if no other one does."""
        this_thread = threading.get_ident()
        try:
            with self._entering:
                self._check_entry(this_thread)
                self._caller = this_thread
        except CollectorStateError:
            raise
        except BaseException:  # Ctrl-C
            self._leave()
            raise

    def _check_entry(self, this_thread: int) -> None:
        if {self._caller, self._busy} - {None, this_thread}:
            raise CollectorStateError(
                "another thread waits for a batch of this collector: take all batches on one "
                "thread and pass them on, or let the threads take turns with a lock of yours"
            )
        if self._busy is not None:
            raise CollectorStateError(
                "this collector is making a batch already: take the next one not within "
                "postproc, a hook or the buffer's extend()"
            )

    def _leave(self) -> None:
        """This thread gets no batch, if it has waited for one."""
        if self._caller == threading.get_ident():
            self._caller = None

    @property
    @abstractmethod
    def _layout(self) -> Layout: ...

    @abstractmethod
    def _next(self, timeout_s: float) -> Collected:
        """The rollouts of the next batch.

        If they were not claimed since, as :attr:`Progress.claimed` tells, they are given again.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Counts, rates and shares of time so far."""

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End what the collector started and release what it holds. May be called again.

        A call that an exception broke off, such as Ctrl-C, is completed by the next one. In a
        forked child of the process that made the collector, it does nothing.

        Args:
            timeout: has no effect: ``Faults.stop_timeout_s`` is the limit for stopping workers.
            close_env: whether to close the envs. False leaves an env of yours open that this
                process steps; workers always close theirs.
            raise_on_error: False: errors of envs and workers that close are only logged.
        """
        if self._is_released or not self._owner.is_here:
            return
        self._closes_envs = self._closes_envs and close_env
        try:
            self._shut_down()
        except Exception:
            if raise_on_error:
                raise
            log.exception("shutting down failed")

    def _shut_down(self) -> None:
        self._state = CollectorState.SHUT_DOWN
        self._stats_recorder.end()
        tensor_cache.forget()
        try:
            self._release(close_envs=self._closes_envs)
        finally:
            self._end_monitor()
        self._is_released = True

    def _end_monitor(self) -> None:
        self._last_stats.append(self.stats())
        if self._monitor_thread.is_current:
            self._close_monitor.run_here()  # a callback shuts its collector down
        else:
            self._close_monitor()

    @abstractmethod
    def _release(self, *, close_envs: bool) -> None:
        """Close what :meth:`_open` made; called again if an exception broke it off."""
