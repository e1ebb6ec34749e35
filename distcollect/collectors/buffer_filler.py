"""Collects in the background, into a replay buffer."""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from distcollect.collectors.replay import Background, RateLimited, ReplayBuffer
from distcollect.collectors.stream import JOIN_TIMEOUT_S, BatchStream
from distcollect.collectors.unpublished import PATIENCE_IN_BACKGROUND
from distcollect.errors import CollectorStateError

_Self = TypeVar("_Self", bound="BufferFiller")


class BufferFiller(BatchStream):
    """A stream of batches that may go to its replay buffer in the background."""

    _background: Background | None = None  # before start()

    def start(self) -> None:
        """Fill the replay buffer in the background, until ``total_frames`` are collected.

        The policy that collects is a copy; :meth:`update_policy_weights_` sends it new weights. Use
        :meth:`async_shutdown` to end. If collection fails, the next call to the collector raises
        the reason, and so does ``sample()`` of a :class:`~distcollect.RateLimited` buffer. A call
        that an exception broke off, such as Ctrl-C, is completed by the next one.

        Raises:
            CollectorStateError: there is no ``replay_buffer``, it was started already, another
                thread waits for a batch, or its class overrides :meth:`next`.
            DeadlineError: the thread that collects did not start in time.
        """
        self._check_open()
        buffer = self._options.replay_buffer
        if buffer is None:
            raise CollectorStateError(
                "start() needs a replay_buffer to fill: pass replay_buffer= to the collector"
            )
        if type(self).next is not BatchStream.next:
            raise CollectorStateError(
                f"start(): {type(self).__name__} has a next() of its own, which is not called in "
                "the background: iterate over the collector, or pass postproc= instead"
            )
        if self._background is None:
            self._enter()  # no other thread waits for a batch
            self._leave()
            self._use(self._made_background(buffer))
        elif self._background.was_started:
            raise CollectorStateError(
                "the collector was started already: end that by async_shutdown(), or use pause()"
            )
        assert self._background is not None
        self._background.begin()

    def _made_background(self, buffer: ReplayBuffer) -> Background:
        # Weakly, as the workers must end when the user drops the collector.
        fill = weakref.WeakMethod(self._fill)

        def collect() -> bool:
            found = fill()
            return found is not None and found()

        return Background(collect, buffer if isinstance(buffer, RateLimited) else None)

    def _use(self, background: Background) -> None:
        """Collect only on this thread from now on, which was not started yet."""
        self._background = background
        if self._unpublished is not None:
            self._unpublished.patience = PATIENCE_IN_BACKGROUND

    def _fill(self) -> bool:
        """Add one batch to the replay buffer; False if ``total_frames`` are collected."""
        if not self._prepare(None):
            return False
        self._hand_out()
        return True

    @property
    def is_running(self) -> bool:
        """Whether it is collecting in the background, after :meth:`start`."""
        return self._background is not None and self._background.is_alive

    def pause(self, timeout_s: float = 600.0) -> AbstractContextManager[None]:
        """A context within which nothing is added to the replay buffer.

        A batch that is being collected when it is entered is added first.

        Args:
            timeout_s: seconds to wait for that batch.

        Raises:
            CollectorStateError: :meth:`start` was not called.
            DeadlineError: that batch was not finished in time.
        """
        self._check_open()
        if self._background is None:
            raise CollectorStateError("pause() is for a collector that was started by start()")
        return self._background.paused(timeout_s)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started by :meth:`start`.

        Args:
            timeout: seconds to wait for the batch that is being collected, which is then added to
                the buffer; None: don't wait, and drop this batch.
            close_env: whether to close the envs. False leaves an env of yours open that this
                process steps; workers always close theirs.

        Raises:
            The error that ended collection in the background.
        """
        background = self._background
        if background is not None:
            background.stop()
            if timeout is not None:
                background.join(timeout)
        self._closes_envs = close_env
        self.shutdown()
        if background is not None:
            background.join(JOIN_TIMEOUT_S)
        self._raise_from_background()

    def _raise_from_background(self) -> None:
        """Raise the error that ended collection in the background, once."""
        if self._background is not None and self._background.error is not None:
            error, self._background.error = self._background.error, None
            raise error

    def _check_open(self) -> None:
        background = self._background
        if self._owner.is_here and background is not None and background.error is not None:
            raise copy.copy(background.error) from background.error
        super()._check_open()

    def _check_delivers(self) -> None:
        super()._check_delivers()
        if self._background is not None:
            raise CollectorStateError(
                "the collector fills its replay buffer in the background since start(): sample "
                "from that, or end it by async_shutdown(). If start() was interrupted, repeat it"
            )

    def _shut_down(self) -> None:
        if self._background is not None:
            self._background.stop()
        super()._shut_down()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        if kind is None:
            self._raise_from_background()
