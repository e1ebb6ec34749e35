"""Collecting in the background, into a replay buffer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict

from distcollect.common.threads import LOOK_UP_S
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError, DeadlineError
from distcollect.rollout.layout import MASK

log = logging.getLogger(__name__)


@runtime_checkable
class ReplayBuffer(Protocol):
    """What takes frames: TorchRL's replay buffers, :class:`RateLimited`, or your own."""

    def extend(self, data: TensorDict) -> Any:
        """Take frames ``[F]``; a TorchRL buffer whose storage has several dimensions ``[n, T]``."""


def check_replay_buffer(given: object) -> ReplayBuffer | None:
    """Raise ArgumentTypeError if it has no ``extend``."""
    if given is None or isinstance(given, ReplayBuffer):
        return given
    raise ArgumentTypeError(
        f"replay_buffer={given!r}: must have a method extend(frames), as TorchRL's buffers do"
    )


def put(batch: TensorDict, buffer: ReplayBuffer) -> int:
    """Extend ``buffer`` with the frames of a batch, padding left out; how many they are."""
    if MASK in batch.keys(include_nested=True):
        frames = batch[batch[MASK]]
    else:
        keeps_rows = getattr(getattr(buffer, "storage", None), "ndim", 1) > 1
        frames = batch if keeps_rows else batch.reshape(-1)
    buffer.extend(frames)
    return int(frames.numel())


class RateLimited:
    """A replay buffer that keeps collection and training in step.

    Collection waits while fewer than ``samples_per_insert`` samples per frame were drawn, and
    sampling waits while more were; either may be ahead by ``slack`` samples. Sampling also waits
    until there are ``min_size`` frames. It is for the threads of one process (the collector's
    ``start()``). Every attribute of the wrapped buffer can be used through this one.

    The scheme is that of Reverb's SampleToInsertRatio (Cassirer et al. 2021, arXiv:2102.04736).
    """

    def __init__(
        self,
        buffer: Any,
        samples_per_insert: float,
        *,
        min_size: int = 1,
        slack: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Limit the rates at which ``buffer`` is filled and sampled from.

        Args:
            buffer: anything with ``extend`` and ``sample``.
            samples_per_insert: samples to be drawn for each frame that is added, above 0.
            min_size: frames that have to be there before the first sample.
            slack: samples by which either side may be ahead, beside one batch; None: a tenth of
                ``samples_per_insert * min_size``.
            timeout_s: seconds for which :meth:`sample` waits at most.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
        """
        check_replay_buffer(buffer)
        if not callable(getattr(buffer, "sample", None)):
            raise ArgumentTypeError(f"RateLimited({buffer!r}): must have a method sample()")
        for name, value in (("samples_per_insert", samples_per_insert), ("timeout_s", timeout_s)):
            if not value > 0:
                raise ArgumentError(f"RateLimited({name}={value!r}): must be above 0")
        if isinstance(min_size, bool) or not isinstance(min_size, int) or min_size < 1:
            raise ArgumentError(f"RateLimited(min_size={min_size!r}): must be a whole number >= 1")
        if slack is not None and slack < 0:
            raise ArgumentError(f"RateLimited(slack={slack!r}): must be 0 or more")
        self._buffer = buffer
        self._samples_per_insert = samples_per_insert
        self._min_size = min_size
        self._slack = samples_per_insert * min_size / 10 if slack is None else slack
        self._timeout_s = timeout_s
        self._inserted = 0
        self._sampled = 0
        self._begun = False  # somebody fills it in the background
        self._ended = False  # nothing more comes in
        self._error: BaseException | None = None  # why
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def __len__(self) -> int:
        return len(self._buffer)

    def extend(self, data: TensorDict) -> Any:
        """Put frames in, at once: who fills it in the background waits before."""
        with self._lock:
            result = self._buffer.extend(data)
            self._inserted += data.numel()
            self._changed.notify_all()
        return result

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As the buffer's, once there is enough.

        Raises:
            DeadlineError: there wasn't within ``timeout_s``.
            CollectorStateError: nothing more comes in: collecting failed, or ended with fewer
                than ``min_size`` frames.
        """
        with self._lock:
            deadline = time.monotonic() + self._timeout_s
            while not self._may_sample():
                if not self._begun:
                    raise CollectorStateError(
                        "there is too little in this buffer to be sampled, and no collector's "
                        "start() fills it in the background, so waiting would not help"
                    )
                if self._error is not None:
                    raise CollectorStateError(
                        f"no more frames come in: {self._error}"
                    ) from self._error
                if self._ended:
                    raise CollectorStateError(
                        f"no more frames come in, and of min_size={self._min_size} there are only "
                        f"{self._inserted}: collect more frames, or lower min_size"
                    )
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"sample() waited {self._timeout_s:g} s for more frames: {self._inserted} "
                        f"came in, {self._sampled} samples were drawn "
                        f"(samples_per_insert={self._samples_per_insert:g}, "
                        f"min_size={self._min_size}). Is the collector still running?"
                    )
                self._changed.wait(min(remaining, LOOK_UP_S))
            samples = self._buffer.sample(*args, **kwargs)
            self._sampled += _num_samples(samples)
            self._changed.notify_all()
        return samples

    def wait_to_insert(self, wanted: Callable[[], bool]) -> None:
        """Block until a batch may come in, or is no longer ``wanted``."""
        with self._lock:
            while wanted() and not self._may_insert():
                self._changed.wait(LOOK_UP_S)

    def begin(self) -> None:
        """Frames will come in from now on."""
        with self._lock:
            self._begun, self._ended, self._error = True, False, None

    def end(self, error: BaseException | None) -> None:
        """No more frames come in: what is there may be sampled without a limit.

        Args:
            error: why, if that is no good reason; :meth:`sample` says so.
        """
        with self._lock:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _owed(self) -> float:
        """Samples that are still to be drawn for the frames that are there."""
        # The first min_size frames come before all sampling.
        return (self._inserted - self._min_size) * self._samples_per_insert - self._sampled

    def _may_insert(self) -> bool:
        # One insert is always allowed when nothing is owed, however large it is.
        return self._inserted < self._min_size or self._owed() <= self._slack

    def _may_sample(self) -> bool:
        if self._error is not None or self._inserted < self._min_size:
            return False
        return self._ended or self._owed() + self._slack >= 0


def _num_samples(samples: Any) -> int:
    first = samples[0] if isinstance(samples, tuple) else samples
    return first.numel() if isinstance(first, TensorDict) else len(first)


class Background:
    """A thread that calls ``collect`` again and again, until it is stopped or that is over."""

    def __init__(self, collect: Callable[[], bool], limit: RateLimited | None) -> None:
        """Begin.

        Args:
            collect: takes one batch; False: there are no more.
            limit: what is filled, if it wants to be asked before.
        """
        self.error: BaseException | None = None
        self._collect = collect
        self._limit = limit
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._pauses = 0
        self._stopped = False
        if limit is not None:
            limit.begin()
        self._thread = threading.Thread(target=self._run, name="distcollect-collect", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it is still collecting, or paused."""
        return self._thread.is_alive()

    def _wanted(self) -> bool:
        return not self._stopped and not self._pauses

    def _run(self) -> None:
        try:
            while self._begin():
                try:
                    more = self._collect()
                finally:
                    self._end()
                if not more:
                    break
        except CollectorStateError as error:
            log.debug("collecting in the background ended: %s", error)  # it was shut down
        except BaseException as error:
            log.exception("collecting in the background ended")
            self.error = error
        finally:
            if self._limit is not None:
                self._limit.end(self.error)

    def _begin(self) -> bool:
        """Wait until a batch is wanted; False if none ever is again."""
        while True:
            with self._lock:
                while self._pauses and not self._stopped:
                    self._changed.wait(LOOK_UP_S)
                if self._stopped:
                    return False
            if self._limit is not None:
                self._limit.wait_to_insert(self._wanted)
            with self._lock:
                if self._wanted():
                    self._busy = True
                    return True

    def _end(self) -> None:
        with self._lock:
            self._busy = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Collect nothing within; the batch under way is finished first.

        Raises:
            DeadlineError: it was not, within ``timeout_s``.
        """
        with self._lock:
            self._pauses += 1
        try:
            deadline = time.monotonic() + timeout_s
            with self._lock:
                while self._busy and self._thread.is_alive():
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise DeadlineError(
                            f"pause() waited {timeout_s:g} s for the batch under way to be "
                            "finished; give it a longer timeout_s"
                        )
                    self._changed.wait(min(remaining, LOOK_UP_S))
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin no other batch."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
