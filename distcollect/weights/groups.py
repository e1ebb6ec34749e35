"""The process groups that this process is in, and broadcasts in them that can be given up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed

from distcollect.common.threads import run_aside
from distcollect.weights.group_backends import GroupMember, backend_named

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Between two looks at a broadcast: this share of the time that it has taken so far.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.0001, 0.02
# How long after a broadcast was given up its backend may still say why it failed.
_LAST_WORD_S = 0.2
# Aborting a group takes milliseconds; whoever leaves all groups waits this long for it at most.
_ABORT_TIMEOUT_S = 2.0


class _PendingBroadcast:
    """What a broadcast needs until it has ended, also if nobody waits for it any more.

    It is kept in no local variable, so that the traceback of an error doesn't keep it alive.

    Attributes:
        group: the process group; None: it was left.
        flat: what is broadcast.
        work: the broadcast; None: it has not begun.
        error: why it failed.
        is_over: whether nothing is read or written any more.
    """

    def __init__(self, group: Any, flat: torch.Tensor) -> None:
        self.group = group
        self.flat: torch.Tensor | None = flat
        self.work: Any = None
        self.error: Exception | None = None
        self.is_over = False

    def look(self) -> bool:
        """Whether it has ended, could not begin, or can't be looked at."""
        if self.error is None:
            try:
                ended: bool = self.work.is_completed()
            except Exception as error:  # noqa: BLE001 - raised again by what waits for it
                self.error = error
            else:
                return ended
        return True

    def finish(self) -> None:
        """Take the outcome of a broadcast that has ended."""
        try:
            if self.error is None:
                self.work.wait()
        except Exception as error:  # noqa: BLE001 - raised again by what waits for it
            self.error = error
        self.is_over = True

    def release(self) -> None:
        """Drop all references."""
        self.group = self.flat = self.work = None


class _BroadcastCancel:
    """How a broadcast that is under way is ended early.

    Attributes:
        given_up: set when nobody waits for it any more.
        aborted: set once an abort of its group has returned.
    """

    def __init__(self) -> None:
        self.given_up = threading.Event()
        self.aborted = threading.Event()
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Wait no longer; when this returns, no :meth:`look` is under way."""
        with self._lock:
            self.given_up.set()

    def look(self, held: _PendingBroadcast) -> bool:
        """Whether the broadcast was given up, or has ended."""
        with self._lock:
            return self.given_up.is_set() or held.look()


# Broadcasts that perhaps have not ended, though their group was aborted: their memory is not used
# again.
_stuck: list[_PendingBroadcast] = []


class Groups:
    """The process groups that this process is in, by name, ordered by their last use."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, tuple[Any, GroupMember]] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[str, _BroadcastCancel] = {}
        self._aborting: list[threading.Thread] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all groups, the least recently used first."""
        with self._lock:
            return tuple(self._groups)

    def keep_only(self, names: Collection[str]) -> None:
        """Leave all other groups."""
        for name in self.names:
            if name not in names:
                self.drop(name)

    def join(self, place: GroupMember, store: Any, address: str) -> None:
        """Join a group if this process is not in it yet, without waiting for the other members."""
        with self._lock:
            joined = self._groups.get(place.group)
        if joined is None:
            prefixed = dist.PrefixStore(place.group, store)
            joined = backend_named(place.backend).make(prefixed, place, address), place
        with self._lock:
            self._groups[place.group] = joined
            self._groups.move_to_end(place.group)

    def broadcast(self, place: GroupMember, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` from rank 0; all members of the group must do so together.

        Raises:
            RuntimeError: a member is gone or too late, the backend refused, or :meth:`drop` was
                called. The group is dropped then; ``flat`` may be torn, and may still be written
                to.
        """
        ending = _BroadcastCancel()
        with self._lock:
            group, _ = self._groups.get(place.group, (None, None))
            held = _PendingBroadcast(group, flat)
            del group
            self._under_way[place.group] = ending
        try:
            _broadcast(held, place, ending)
        except RuntimeError:
            self.drop(place.group)
            if not backend_named(place.backend).needs_abort:
                # Destroying the group waits for the broadcast to end, which Gloo can't cancel.
                run_aside(_destroy, held, place)
            raise
        finally:
            with self._lock:
                del self._under_way[place.group]

    def drop(self, name: str) -> None:
        """Leave a group; a broadcast of it that is under way here fails at once."""
        with self._lock:
            group, place = self._groups.pop(name, (None, None))
            ending = self._under_way.get(name)
        if ending is not None:
            # Before the abort: what was aborted can't be told from what was completed.
            ending.give_up()
        if place is not None and backend_named(place.backend).needs_abort:
            # An abort may block, as a member that is being connected can't be aborted.
            thread = run_aside(_abort, group, ending)
            with self._lock:
                self._aborting = [each for each in self._aborting if each.is_alive()]
                if thread is not None:
                    self._aborting.append(thread)

    def close(self) -> None:
        """Leave all groups."""
        self.keep_only(())
        deadline = time.monotonic() + _ABORT_TIMEOUT_S
        with self._lock:
            aborting, self._aborting = self._aborting, []
        for thread in aborting:
            thread.join(max(0.0, deadline - time.monotonic()))


def _abort(group: Any, ending: _BroadcastCancel | None) -> None:
    try:
        with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
            group.abort()
    finally:
        if ending is not None:
            ending.aborted.set()


def _broadcast(held: _PendingBroadcast, place: GroupMember, ending: _BroadcastCancel) -> None:
    """Broadcast in the group that is held."""
    if held.group is None:
        raise RuntimeError(f"process group {place.group} was left before its broadcast")
    backend, given_up = backend_named(place.backend), ending.given_up
    if backend.needs_abort:
        # The first broadcast connects all members, and waits for a dead one without an end.
        threading.Thread(target=_broadcast_aside, args=(held, place, ending), daemon=True).start()
        is_over = _comes(lambda: held.is_over, given_up, place.timeout_s)
        is_over = is_over and not given_up.is_set()
    else:
        _begin(held, place)
        is_over = _comes(held.look, given_up, place.timeout_s)
        if is_over:
            held.finish()
    if not is_over:
        # A backend that refuses may have told another member first, who then broke it off.
        if backend.needs_abort:
            _comes(lambda: held.error is not None, threading.Event(), _LAST_WORD_S)
        said = "" if held.error is None else f" ({backend.name}: {held.error})"
        raise RuntimeError(
            f"the broadcast in process group {place.group} was given up: a member is gone, or it "
            f"took longer than {place.timeout_s:g} s{said}"
        )
    if held.error is not None:
        raise RuntimeError(
            f"{backend.name} could not broadcast in process group {place.group}: {held.error}"
        ) from held.error


def _begin(held: _PendingBroadcast, place: GroupMember) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = place.timeout
    try:
        held.work = held.group.broadcast([held.flat], options)
    except Exception as error:  # noqa: BLE001 - raised again by what waits for it
        held.error = error


def _broadcast_aside(held: _PendingBroadcast, place: GroupMember, ending: _BroadcastCancel) -> None:
    """Broadcast on a thread of its own: it may hang in each call of the backend."""
    _begin(held, place)
    has_begun = held.error is None
    if has_begun and ending.given_up.is_set():
        _abort(held.group, None)  # the first abort came too early to end this
    has_ended = _ends(held, ending, 2 * place.timeout_s)
    if has_ended and has_begun and held.error is not None:  # a look failed, and told nothing
        held.is_over = True
        has_ended = False
    if has_ended:
        held.finish()
        held.release()
    else:
        _stuck.append(held)


def _ends(held: _PendingBroadcast, ending: _BroadcastCancel, limit_s: float) -> bool:
    """Wait for a broadcast to end, or for each step of its abort, up to ``limit_s``."""
    never = threading.Event()
    if not _comes(lambda: ending.look(held), never, limit_s):
        return False
    if not ending.given_up.is_set() or held.error is not None:
        return True
    # Torch aborts under a lock that a look waits for while it holds the interpreter's lock. So a
    # look during an abort would stop all threads of this process until the abort has returned.
    return ending.aborted.wait(limit_s) and _comes(held.look, never, limit_s)


def _comes(condition: Callable[[], bool], given_up: threading.Event, timeout_s: float) -> bool:
    """Wait for ``condition`` up to ``timeout_s``, or until it is given up; whether it has come.

    It looks again and again, with pauses that grow with the time. Torch could also call a function
    here, or wait for the work itself. But if the work fails while the interpreter shuts down, then
    C++ code with an exception on its way can't take the interpreter's lock, and aborts the process.
    """
    begin = time.monotonic()
    while not condition():
        elapsed = time.monotonic() - begin
        pause_s = min(max(elapsed * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        if elapsed > timeout_s or given_up.wait(pause_s):
            return condition()
    return True


def _destroy(held: _PendingBroadcast, place: GroupMember) -> None:
    """Drop the references to a broadcast that was given up once it has ended."""
    if held.work is not None:
        _comes(held.look, threading.Event(), 2 * place.timeout_s)
        held.finish()
    held.release()
