"""The process groups that this process is in, and broadcasts in them that can be given up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed

from distcollect.common.forks import keep_for_ever
from distcollect.common.threads import BeforeExit, run_aside
from distcollect.weights.group_backends import GroupMember, backend_named

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Between two polls of a broadcast: this share of the time that it has taken so far.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.0001, 0.02
# How long after a broadcast was given up its backend may still say why it failed.
_LAST_WORD_S = 0.2
# Aborting a group takes milliseconds; whoever leaves all groups waits this long for it at most.
_ABORT_TIMEOUT_S = 2.0
# The interpreter's exit waits for calls of a backend, which may hang, for this long at most.
_before_exit = BeforeExit(2.0)


class _Broadcast:
    """A broadcast on a thread of its own, as it may hang in each call of the backend.

    Attributes:
        error: why it failed.
        failed: set with the error.
        settled: set when it has ended, or when nobody waits for it any more.
    """

    def __init__(self, group: Any, member: GroupMember, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` in ``group``."""
        self.error: Exception | None = None
        self.failed = threading.Event()
        self.settled = threading.Event()
        self._group = group
        self._member = member
        self._flat: torch.Tensor | None = flat
        self._work: Any = None
        self._backend = backend_named(member.backend)
        self._given_up = threading.Event()
        self._aborted = threading.Event()
        self._polling = threading.Lock()

    def run(self) -> None:
        """Begin, and wait for the end, also if nobody else waits for it any more."""
        if _before_exit.do(self._begin):
            if self.error is None and not self._ends():
                _stuck.append(self)
                self.settled.set()
                return
            if _before_exit.do(self._finish):
                return
        # The process exits, and Gloo's threads may go on: destroying the group would wait for them.
        keep_for_ever(self)
        self._fail(RuntimeError("the interpreter shuts down"))
        self.settled.set()

    def give_up(self) -> None:
        """Wait no longer; when this returns, the broadcast is polled no more before an abort."""
        with self._polling:
            self._given_up.set()
        self.settled.set()

    def abort(self, group: Any) -> None:
        """Abort the group, which ends this after :meth:`give_up`."""
        try:
            if self._backend.needs_abort:
                _abort(group)
        finally:
            self._aborted.set()

    def check(self) -> None:
        """Raise RuntimeError if it failed, was given up, or has not ended in time."""
        name, backend = self._member.group, self._backend
        if self._given_up.is_set() or not self.settled.is_set():
            # A backend that refuses may have told another member first, who then broke it off.
            if backend.needs_abort:
                self.failed.wait(_LAST_WORD_S)
            said = "" if self.error is None else f" ({backend.name}: {self.error})"
            raise RuntimeError(
                f"the broadcast in process group {name} was given up: a member is gone, or it "
                f"took longer than {self._member.timeout_s:g} s{said}"
            )
        if self.error is not None:
            raise RuntimeError(
                f"{backend.name} could not broadcast in process group {name}: {self.error}"
            ) from self.error

    def _begin(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._member.timeout
        try:
            self._work = self._group.broadcast([self._flat], options)
        except Exception as error:  # noqa: BLE001 - raised again by who waits for it
            self._fail(error)
            return
        if self._given_up.is_set():
            self.abort(self._group)  # the first abort came too early to end this

    def _finish(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:  # noqa: BLE001 - raised again by who waits for it
            self._fail(error)
        self.settled.set()
        # An error's traceback may keep this alive, but not the memory.
        self._group = self._flat = self._work = None

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.failed.set()

    def _ends(self) -> bool:
        """Wait for the end, or after :meth:`give_up` for each step of the abort.

        It polls with pauses that grow with the time. Torch could also call a function here, or wait
        for the work itself. But if the work fails while the interpreter shuts down, then C++ code
        with an exception on its way can't take the interpreter's lock, and aborts the process.
        """
        limit_s = 2 * self._member.timeout_s
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < limit_s:
            with self._polling:
                if not self._given_up.is_set() or self._aborted.is_set():
                    try:
                        if self._work.is_completed():
                            return True
                    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
                        self._fail(error)  # which tells nothing of whether it has ended
                        return False
            # Torch aborts under a lock that a poll waits for while it holds the interpreter's lock.
            # So a poll during an abort would stop all threads until the abort has returned.
            is_aborting = self._given_up.is_set() and not self._aborted.is_set()
            if is_aborting:
                self._aborted.wait(limit_s)
            else:
                time.sleep(min(max(elapsed * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        return False


# Broadcasts that perhaps have not ended, though their group was aborted: their memory is not used
# again.
_stuck: list[_Broadcast] = []


class Groups:
    """The process groups that this process is in, by name, ordered by their last use."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, tuple[Any, GroupMember]] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[str, _Broadcast] = {}
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

    def join(self, member: GroupMember, store: Any, address: str) -> None:
        """Join a group if this process is not in it yet, without waiting for the other members."""
        with self._lock:
            joined = self._groups.get(member.group)
        if joined is None:
            prefixed = dist.PrefixStore(member.group, store)
            joined = backend_named(member.backend).make(prefixed, member, address), member
        with self._lock:
            self._groups[member.group] = joined
            self._groups.move_to_end(member.group)

    def broadcast(self, member: GroupMember, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` from rank 0; all members of the group must do so together.

        Raises:
            RuntimeError: a member is gone or too late, the backend refused, or :meth:`drop` was
                called. The group is dropped then; ``flat`` may be torn, and may still be written
                to.
        """
        with self._lock:
            if member.group not in self._groups:
                raise RuntimeError(f"process group {member.group} was left before its broadcast")
            broadcast = _Broadcast(self._groups[member.group][0], member, flat)
            self._under_way[member.group] = broadcast
        try:
            threading.Thread(target=broadcast.run, daemon=True).start()
            broadcast.settled.wait(member.timeout_s)
            broadcast.check()
        except RuntimeError:
            self.drop(member.group)
            raise
        finally:
            with self._lock:
                del self._under_way[member.group]

    def drop(self, name: str) -> None:
        """Leave a group; a broadcast of it that is under way here fails at once."""
        with self._lock:
            group, member = self._groups.pop(name, (None, None))
            broadcast = self._under_way.get(name)
        if broadcast is not None:
            # Before the abort: what was aborted can't be told from what was completed.
            broadcast.give_up()
        if member is None:
            return
        if backend_named(member.backend).needs_abort:
            # An abort may block, as a member that is being connected can't be aborted.
            abort = _abort if broadcast is None else broadcast.abort
            thread = run_aside(abort, group)
            with self._lock:
                self._aborting = [each for each in self._aborting if each.is_alive()]
                if thread is not None:
                    self._aborting.append(thread)
        elif broadcast is not None:
            broadcast.abort(group)

    def close(self) -> None:
        """Leave all groups."""
        self.keep_only(())
        deadline = time.monotonic() + _ABORT_TIMEOUT_S
        with self._lock:
            aborting, self._aborting = self._aborting, []
        for thread in aborting:
            thread.join(max(0.0, deadline - time.monotonic()))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
        group.abort()
