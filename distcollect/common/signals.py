"""Signals to the user's thread: Ctrl-C, and those that ask this process to end.

Python runs the handler of a signal on the main thread, between any two of its steps. An exception
there could leave anything half done. So the handlers note the signal, and :func:`check` raises
what follows from it where nothing is half done: before the user's thread waits, and between two
steps of envs. As in trio (``_core/_ki.py``), the innermost frame decides whether Ctrl-C is noted:
in the user's own code it is raised at once. Libraries that we and the user call don't count.

Ctrl-C is handled so on the main thread, while a collector is open, if nobody else handles it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython, as _thread
import _thread
import atexit
import contextlib
import inspect
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

log = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=BaseException)

# Most schedulers send SIGTERM before they end a job; submitit and sbatch --signal send SIGUSR2.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# "Temporary failure; the user is invited to retry", of sysexits.h.
EXIT_TO_RESUME = 75
# Longest single wait of the user's thread, in seconds. A signal that arrives just as the main
# thread begins to wait is handled only when the wait ends.
WAKEUP_INTERVAL_S = 0.5
# Between two looks whether Ctrl-C that was noted can be raised now.
_AGAIN_S = 0.01

_OURS = __name__.partition(".")[0]
_LIBRARIES = sys.stdlib_module_names | {"torch", "tensordict", "numpy", "cloudpickle"}


class Interrupted(SystemExit):
    """This process ends on request, with its state saved: it can be resumed."""

    def __init__(self) -> None:
        super().__init__(EXIT_TO_RESUME)


def _do_nothing() -> None:
    pass


# Signals concern the process.
_requested = ""  # the signal that asked this process to end
_save_and_exit: Callable[[], None] | None = None
_is_ending = False  # the main thread does that, or has done it
_previous: dict[int, Any] = {}  # handlers of the signals that ask for that
_is_noted = False  # Ctrl-C came, and is still to be raised
_is_again = False  # the next SIGINT is our own
_open: set[int] = set()  # ids of the objects that Ctrl-C is noted for
_wake: Callable[[], object] = _do_nothing  # what the main thread waits in, or steps envs


def check() -> None:
    """Raise what a signal asked for; on other threads than the main one it does nothing.

    Raises:
        KeyboardInterrupt: Ctrl-C was noted.
        Interrupted: this process was asked to end, and :func:`watch` called. The state is saved.
    """
    if not (_is_noted or _requested) or not _is_main_thread():
        return
    if _is_noted:
        _interrupt()
    if _save_and_exit is not None and not _is_ending:
        _save_and_exit()


def _interrupt() -> NoReturn:
    """Raise KeyboardInterrupt, the answer to every Ctrl-C so far."""
    forget_ctrl_c()
    raise KeyboardInterrupt


def forget_ctrl_c() -> None:
    """Forget each Ctrl-C that came so far: what it was to end has ended."""
    global _is_noted, _requested, _is_ending  # noqa: PLW0603
    _is_noted = False
    if _requested == signal.SIGINT.name:
        _requested, _is_ending = "", False


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


@contextlib.contextmanager
def waking(wake: Callable[[], object]) -> Iterator[None]:
    """Within, a signal that is noted calls ``wake``, which has the main thread :func:`check`."""
    global _wake  # noqa: PLW0603
    if not _is_main_thread():
        yield
        return
    before, _wake = _wake, wake
    try:
        yield
    finally:
        _wake = before


class Wakeup:
    """Wakes one thread that waits for a change. Ringing is remembered until the next wait."""

    def __init__(self) -> None:
        # A signal's handler may put into this queue, even if it interrupts the same.
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Wake the thread that waits, or let the next wait end at once."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, at most ``timeout_s``; may end earlier.

        Raises:
            KeyboardInterrupt, Interrupted: see :func:`check`.
        """
        check()
        with waking(self.ring), contextlib.suppress(queue.Empty):
            self._rings.get(timeout=min(max(0.0, timeout_s), WAKEUP_INTERVAL_S))

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``is_done()``, which who rings has changed; False if it is not in time."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self.wait(remaining)
        return True


# Ctrl-C.


def note_ctrl_c(owner: object) -> Callable[[], object]:
    """Note Ctrl-C while our own code runs, as long as ``owner`` is there.

    Returns:
        Ends that earlier.
    """
    number = id(owner)
    _open.add(number)
    go_on_noting()
    return weakref.finalize(owner, _note_no_longer, number)


def go_on_noting() -> None:
    """Note Ctrl-C again if that has ended; notebooks set Python's handler before each cell."""
    # signal.getsignal() looks for a constant that equals the handler, which takes long.
    is_default = _signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _open and is_default and _is_main_thread():
        signal.signal(signal.SIGINT, _note if signal.SIGINT in _previous else _on_ctrl_c)


def _note_no_longer(number: int) -> None:
    _open.discard(number)
    # On another thread it can't be set: then _on_ctrl_c does what the default handler does.
    ours = _is_main_thread() and signal.getsignal(signal.SIGINT) is _on_ctrl_c
    if ours and not _open and not _is_noted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_ctrl_c(_number: int, frame: FrameType | None) -> None:
    global _is_noted, _is_again  # noqa: PLW0603
    is_again, _is_again = _is_again, False
    if is_again and not _is_noted:
        return  # it was raised meanwhile
    if not _open:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _open or _is_users(frame):
        _interrupt()
    if not _is_noted:
        _is_noted = True
        with contextlib.suppress(RuntimeError):  # at exit, Python 3.12 starts no threads
            _thread.start_new_thread(_look_again, ())
    _wake()


def _is_users(frame: FrameType | None) -> bool:
    """Return True if the innermost frame outside of libraries is not ours."""
    while frame is not None:
        module = _module_of(frame)
        if module not in _LIBRARIES:
            return module != _OURS
        frame = frame.f_back
    return True


def _module_of(frame: FrameType) -> str:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    # Methods of a NamedTuple have a module of their own.
    return "collections" if module.startswith("namedtuple_") else module


def cut(error: _Error) -> _Error:
    """Return ``error``, just caught, without its traceback if no code of the user's is in that.

    Its message says all, and our lines would hide the user's line that called us.
    """
    modules = {_module_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)}
    return error.with_traceback(None) if modules <= {_OURS, *_LIBRARIES} else error


def forget_last_error() -> None:
    """Let the error that an interactive session keeps hold no collector that nobody else has."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if _module_of(frame) == _OURS:
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()
                # Also from the dict of them that who shows the error made, before Python 3.13.
                _ = frame.f_locals
        error = error.__context__


def interrupts_us() -> bool:
    """Return True if a handler of a signal runs on this thread that has interrupted our own code.

    That may hold locks, unless it waits.
    """
    if not _is_main_thread() or _wake is not _do_nothing:
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None and not _is_users(frame.f_back)


def _look_again() -> None:
    """Have the handler look at the main thread's frame again, until Ctrl-C is raised."""
    global _is_again  # noqa: PLW0603
    while _is_noted:
        time.sleep(_AGAIN_S)
        if _is_noted:
            _is_again = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


# Signals that ask this process to end.


def watch(save_and_exit: Callable[[], None], *, ctrl_c: bool = False) -> None:
    """Note the signals from now on; :func:`check` then calls ``save_and_exit``.

    Args:
        save_and_exit: calls :func:`begin_end`, saves, and calls :func:`end`.
        ctrl_c: Ctrl-C is one of them; when it comes twice, the second one has its usual effect.
    """
    global _save_and_exit  # noqa: PLW0603
    _save_and_exit = save_and_exit
    if not _is_main_thread():
        log.warning("a Checkpoint that is not made on the main thread sees no signals")
        return
    # A notebook's kernel would go on after the SystemExit that follows.
    of_others = () if "IPython" in sys.modules and hasattr(sys, "ps1") else SIGNALS
    for number in (*of_others, *[signal.SIGINT][: int(ctrl_c)]):
        if signal.getsignal(number) is not _note:
            # None: it was not set by Python, which so can't restore it.
            _previous[number] = signal.signal(number, _note) or signal.SIG_DFL


def requested_signal() -> str:
    """The signal that asked this process to end; "" if none did."""
    return _requested


def begin_end() -> None:
    """No :func:`check` saves from now on: what follows, such as closing the collectors, waits."""
    global _is_ending  # noqa: PLW0603
    _is_ending = _is_main_thread()  # SystemExit ends another thread silently


def end() -> NoReturn:
    """Raise what the signal asked for.

    Raises:
        KeyboardInterrupt: it was Ctrl-C. In a notebook the user may go on after that.
        Interrupted: it was another one.
    """
    if _requested == signal.SIGINT.name:
        _interrupt()
    raise Interrupted


def _note(number: int, frame: FrameType | None) -> None:
    global _requested  # noqa: PLW0603
    if number == signal.SIGINT and (_requested or _is_again):
        _on_ctrl_c(number, frame)
        return
    _requested = signal.Signals(number).name
    _wake()
    if number == signal.SIGINT:
        return
    previous = _previous.get(number)
    if callable(previous):
        previous(number, frame)


def stop_watching() -> None:
    """Restore the handlers from before :func:`watch`, and forget a signal that has come."""
    global _save_and_exit, _requested, _is_ending
    _save_and_exit, _requested, _is_ending = None, "", False
    for number, handler in _previous.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, handler)
    _previous.clear()


def _forked() -> None:
    """A signal that is sent to a forked child concerns that process alone.

    A DataLoader, for example, ends its children by SIGTERM.
    """
    global _is_noted  # noqa: PLW0603
    stop_watching()
    _open.clear()
    _is_noted = False
    if signal.getsignal(signal.SIGINT) is _on_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _ignore_repeated() -> None:
    """Let the signal that ends this process not come again, with the exit code of its own.

    Python restores the default handlers when it exits, and then takes a second to free its objects.
    """
    for number in SIGNALS:
        if _requested and signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_IGN)


atexit.register(_ignore_repeated)
os.register_at_fork(after_in_child=_forked)
