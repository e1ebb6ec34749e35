"""The process groups that weights are broadcast in, by Gloo, NCCL or a registered backend.

A :class:`GroupBackend` makes groups; :class:`Groups` are those that this process is in. A broadcast
can be given up at any time, on each side: by its own deadline, or by another thread that leaves the
group.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distcollect.common import torch_backends
from distcollect.common.forks import keep_for_ever
from distcollect.common.threads import BeforeExit, run_aside
from distcollect.errors import ArgumentError
from distcollect.net.interfaces import interface_of
from distcollect.version import TESTED

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Gloo waits five times as long for a member's connection. All members have joined by then, and if
# one has died since, the others are told to wait no longer; this limit is for when that message
# doesn't arrive.
_CONNECT_TIMEOUT_S = 2.0
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# Between two polls of a broadcast: this share of the time that it has taken so far.
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.0001, 0.02
# How long after a broadcast was given up its backend may still say why it failed.
_LAST_WORD_S = 0.2
# The interpreter's exit waits for calls of a backend, which may hang, for this long at most.
_before_exit = BeforeExit(2.0)


@dataclass(frozen=True)
class GroupMember:
    """A member of a process group.

    Attributes:
        group: the group's name.
        rank: the member's rank in it; the sender's is 0.
        size: how many members it has.
        timeout_s: for a broadcast.
        backend: the name of its backend.
    """

    group: str
    rank: int
    size: int
    timeout_s: float
    backend: str

    @property
    def timeout(self) -> timedelta:
        """``timeout_s`` as torch takes it."""
        return timedelta(seconds=self.timeout_s)


class GroupBackend(ABC):
    """A kind of process group.

    Attributes:
        name: as in :class:`~distcollect.WeightSync`.
        on_gpu: whether it takes tensors on GPUs, and no others.
        needs_abort: whether a member waits for a dead one until its group is aborted, and to start
            a broadcast may wait for all other members.
    """

    name: str
    on_gpu: bool = False
    needs_abort: bool = True

    def refusal(self, gpus: Sequence[str]) -> str:
        """Why members can't form a group, as a clause; "": nothing is known against it.

        Args:
            gpus: a name of the GPU that has the weights of each member, "" for the CPU. The
                sender's comes first.
        """
        return ""

    @abstractmethod
    def make(self, store: Any, member: GroupMember, address: str) -> Any:
        """A process group, without waiting for other members.

        Args:
            store: where the members of this group, and no others, find each other.
            member: this process's place in it.
            address: this host's, on the interface to use.
        """

    def keys(self, member: GroupMember) -> list[str]:
        """The keys that the group leaves in its store."""
        return []


class GlooBackend(GroupBackend):
    """Gloo: between CPUs. A member's death is an error for those that are connected with it."""

    name = "gloo"
    needs_abort = False

    def refusal(self, gpus: Sequence[str]) -> str:
        try:
            kind = dist.ProcessGroupGloo
            _ = kind.create_device, kind._Options._devices, kind._Options._timeout  # noqa: SLF001
        except AttributeError as error:
            return f"torch {torch.__version__} lacks {error.name}, torch {TESTED['torch']} has it"
        return ""

    def make(self, store: Any, member: GroupMember, address: str) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no public way
        # The address names the interface. Connections are made on first use, as a broadcast needs a
        # tree of them, not all pairs; so this waits for no other member.
        options._devices = [  # noqa: SLF001
            dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
        ]
        options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)  # noqa: SLF001
        return dist.ProcessGroupGloo(store, member.rank, member.size, options)

    def keys(self, member: GroupMember) -> list[str]:
        return [f"0/{rank}" for rank in range(member.size)]


class NcclBackend(GroupBackend):
    """NCCL: between GPUs, one for each member."""

    name = "nccl"
    on_gpu = True

    def refusal(self, gpus: Sequence[str]) -> str:
        if dist.is_nccl_available() and all(gpus) and len(set(gpus)) == len(gpus):
            return ""
        lacks = "" if dist.is_nccl_available() else ", and this torch has no NCCL"
        return (
            f"trainer and workers need a GPU each, but have {[gpu or 'cpu' for gpu in gpus]} "
            f"(trainer first){lacks}"
        )

    def make(self, store: Any, member: GroupMember, address: str) -> Any:
        name_interface(address)
        # A watchdog would end the whole process when another member dies or is late. Without one, a
        # work tells that it failed, and what waits for it has its own time limit. Torch takes this
        # from the environment only, when a group is made. The user's own groups keep theirs.
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            return dist.ProcessGroupNCCL(store, member.rank, member.size, member.timeout)
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before

    def keys(self, member: GroupMember) -> list[str]:
        return ["0"]


class RegisteredBackend(GroupBackend):
    """A backend that was registered with ``torch.distributed.Backend.register_backend``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_gpu = "cpu" not in torch_backends.device_types(name)

    def refusal(self, gpus: Sequence[str]) -> str:
        kind = "GPU" if self.on_gpu else "CPU"
        if all(bool(gpu) == self.on_gpu for gpu in gpus):
            return ""
        return (
            f"it is registered for the {kind}, and the weights of trainer and workers are on "
            f"{[gpu or 'cpu' for gpu in gpus]} (trainer first)"
        )

    def make(self, store: Any, member: GroupMember, address: str) -> Any:
        make = torch_backends.creator(self.name)
        if make is None:
            raise ArgumentError(
                f"WeightSync(backend={self.name!r}): no such backend is registered in this "
                "process; register it on trainer and workers, there for example in init_fn"
            )
        return make(store, member.rank, member.size, member.timeout)


def backend_named(name: str) -> GroupBackend:
    """The backend with this name; one that torch doesn't bring must be registered to be used."""
    return _BUILT_IN.get(name) or RegisteredBackend(name)


_BUILT_IN: dict[str, GroupBackend] = {
    backend.name: backend for backend in (GlooBackend(), NcclBackend())
}


def name_interface(address: str) -> None:
    """Have NCCL use the interface of ``address``; it takes that from the environment only.

    Does nothing if the user has named an interface. Nor for loopback: NCCL reads the variable once
    in a process, and later groups may need the network.
    """
    interface = interface_of(address)
    if interface not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


class _Broadcast:
    """A broadcast on a thread of its own, as it may hang in each call of the backend.

    Attributes:
        thread: this thread; it goes on to the end, also if nobody waits for it any more.
        error: why it failed.
        settled: set when it has ended, or was given up.
        given_up: set when nobody waits for it any more.
        aborted: set when the group was aborted after that.
    """

    def __init__(self, group: Any, member: GroupMember, flat: torch.Tensor) -> None:
        """Broadcast ``flat`` in ``group``, once the thread is started."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None
        self.settled = threading.Event()
        self.given_up = threading.Event()
        self.aborted = threading.Event()
        self.needs_abort = backend_named(member.backend).needs_abort
        self._group = group
        self._member = member
        self._flat: torch.Tensor | None = flat
        self._work: Any = None
        self._polling = threading.Lock()

    def give_up(self) -> None:
        """Wait no longer; when this returns, the broadcast is polled no more before an abort."""
        with self._polling:
            self.given_up.set()
        self.settled.set()

    def failure(self) -> str:
        """Return why it failed, was given up, or has not ended in time; "": it was completed."""
        name, backend = self._member.group, self._member.backend
        if self.settled.is_set() and not self.given_up.is_set():
            why = f"{backend} could not broadcast in process group {name}: {self.error}"
            return why if self.error else ""
        # A backend that refuses may have told another member first, who then broke it off.
        if self.needs_abort:
            self.thread.join(_LAST_WORD_S)
        said = f" ({backend}: {self.error})" if self.error else ""
        return (
            f"the broadcast in process group {name} was given up: a member is gone, or it took "
            f"longer than {self._member.timeout_s:g} s{said}"
        )

    def _run(self) -> None:
        if _before_exit.do(self._begin) and self._ends() and _before_exit.do(self._finish):
            return
        # Torch perhaps still works on it, and its memory must not be used again. Or the process
        # exits, and Gloo's threads go on: destroying the group would wait for them.
        keep_for_ever(self)
        self.error = self.error or RuntimeError("the interpreter shuts down")
        self.settled.set()

    def _begin(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._member.timeout
        try:
            self._work = self._group.broadcast([self._flat], options)
        except Exception as error:  # noqa: BLE001 - raised again by who waits for it
            self.error = error
            return
        if self.given_up.is_set() and self.needs_abort:
            _abort(self._group, self)  # the first abort came too early to end this

    def _ends(self) -> bool:
        """Wait for the end, and if it was given up for the abort before; False: it is not known.

        It polls with pauses that grow with the time. Torch could also call a function here, or wait
        for the work itself. But if the work fails while the interpreter shuts down, then C++ code
        with an exception on its way can't take the interpreter's lock, and aborts the process.
        """
        limit_s = 2 * self._member.timeout_s
        begin = time.monotonic()
        while self._work is not None:
            if (elapsed := time.monotonic() - begin) > limit_s:
                return False
            # Torch aborts under a lock that a poll waits for while it holds the interpreter's lock.
            # So a poll during an abort would stop all threads until the abort has returned.
            with self._polling:
                is_aborting = self.needs_abort and self.given_up.is_set()
                may_poll = not is_aborting or self.aborted.is_set()
                if may_poll:
                    try:
                        if self._work.is_completed():
                            break
                    except Exception as error:  # noqa: BLE001 - raised again by who waits for it
                        self.error = error
                        return False
            if may_poll:
                time.sleep(min(max(elapsed * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            else:
                self.aborted.wait(limit_s)
        return True

    def _finish(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except Exception as error:  # noqa: BLE001 - raised again by who waits for it
            self.error = error
        self.settled.set()
        # An error's traceback may keep this alive, but not the memory.
        self._group = self._flat = self._work = None


class Groups:
    """The process groups that this process is in, by name, ordered by their last use."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, tuple[Any, GroupMember]] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[str, _Broadcast] = {}

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
            broadcast.thread.start()
            broadcast.settled.wait(member.timeout_s)
            failure = broadcast.failure()
            if failure:
                self.drop(member.group)
        finally:
            with self._lock:
                del self._under_way[member.group]
        if failure:
            raise RuntimeError(failure) from broadcast.error

    def drop(self, name: str) -> None:
        """Leave a group; a broadcast of it that is under way here fails at once."""
        with self._lock:
            left = [self._groups.pop(name)] if name in self._groups else []
            broadcast = self._under_way.get(name)
        if broadcast is not None:
            # Before the abort: what was aborted can't be told from what was completed.
            broadcast.give_up()
        if left:
            # While a member is being connected, an abort may block, and so may the destructor.
            run_aside(_leave, left, broadcast)

    def close(self) -> None:
        """Leave all groups."""
        self.keep_only(())


def _leave(left: list[tuple[Any, GroupMember]], broadcast: _Broadcast | None) -> None:
    """Take a group out of ``left``, abort it if its backend needs that, and destroy it."""

    def leave() -> None:
        group, member = left.pop()
        if backend_named(member.backend).needs_abort:
            _abort(group, broadcast)

    if not _before_exit.do(leave):
        keep_for_ever(left)


def _abort(group: Any, broadcast: _Broadcast | None) -> None:
    try:
        with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
            group.abort()
    finally:
        if broadcast is not None:
            broadcast.aborted.set()
