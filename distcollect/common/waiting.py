"""Waiting: for the answers of other threads and processes, and when to say that one still waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from distcollect.common import signals
from distcollect.common.signals import WAKEUP_INTERVAL_S, Wakeup

K = TypeVar("K")
T = TypeVar("T")

# Workers usually start in less.
FIRST_S = 10.0


@dataclass
class Reminder:
    """A wait is mentioned after ten seconds, then after twenty, forty, and so on.

    Attributes:
        began: when the wait began, in seconds of the monotonic clock.
        at: when it is to be mentioned next.
    """

    began: float

    def __post_init__(self) -> None:
        self.at = self.began + FIRST_S

    def is_due(self, now: float) -> bool:
        """Return True if the wait is to be mentioned now, and set the next time."""
        if now < self.at:
            return False
        self.at = self.began + 2 * (now - self.began)
        return True


def wait_for(
    changed: threading.Condition,
    is_done: Callable[[], bool],
    timeout_s: float,
    remind: Callable[[float], object] = lambda _: None,
) -> bool:
    """Wait as ``changed.wait_for(is_done, timeout_s)`` does.

    Args:
        changed: notified after every change; its lock is reentrant.
        is_done: called with the lock held.
        timeout_s: seconds.
        remind: called with the seconds so far, each time that the wait is to be mentioned.

    Raises:
        KeyboardInterrupt, Interrupted: see :func:`.signals.check`.
    """
    reminder = Reminder(time.monotonic())
    deadline = reminder.began + timeout_s
    while True:
        with changed:
            if is_done():
                return True
        signals.check()  # without the lock: a Checkpoint may save, which waits for other threads
        now = time.monotonic()
        if now >= deadline:
            return False
        if reminder.is_due(now):
            remind(now - reminder.began)
        with changed:
            if not is_done():
                changed.wait(min(reminder.at - now, deadline - now, WAKEUP_INTERVAL_S))


def answer(future: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Call ``function``; ``future`` gets what it returns or raises."""
    try:
        value = function(*args)
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
        future.set_exception(error)
    else:
        future.set_result(value)


def settle(future: Future[T], value: T, error: BaseException | None) -> None:
    """Give ``future`` a value, or the error in its place."""
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def arrives(answer: Future[Any], timeout_s: float) -> bool:
    """Wait up to ``timeout_s`` for ``answer``; return True if it came (a result or an error)."""
    if answer.done():
        return True
    wakeup = Wakeup()
    answer.add_done_callback(lambda _: wakeup.ring())
    return wakeup.wait_until(answer.done, timeout_s)


def missing(answers: Mapping[K, Future[Any]], timeout_s: float) -> list[K]:
    """Wait up to ``timeout_s`` for all ``answers``; return the keys of those that are missing."""
    deadline = time.monotonic() + timeout_s
    return [
        key for key, answer in answers.items() if not arrives(answer, deadline - time.monotonic())
    ]
