"""The kinds of process groups that weights are broadcast in: Gloo, NCCL, registered backends."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from distcollect.common import torch_backends
from distcollect.errors import ArgumentError
from distcollect.net.interfaces import interface_of

# Torch declares no types for its stores and process groups.
dist: Any = torch.distributed

# Gloo waits five times as long for a member's connection. All members have joined by then, and if
# one has died since, the others are told to wait no longer; this limit is for when that message
# doesn't arrive.
_CONNECT_TIMEOUT_S = 2.0
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment_lock = threading.Lock()


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
        missing = _missing_gloo_parts()
        return f"torch {torch.__version__} lacks {', '.join(missing)}" if missing else ""

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


def _missing_gloo_parts() -> list[str]:
    """Names of the private parts of torch that a Gloo group needs and this torch lacks."""
    kind = getattr(dist, "ProcessGroupGloo", None)
    if kind is None:
        return ["ProcessGroupGloo"]
    needed = ((kind, "_Options"), (kind, "create_device"))
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    options = getattr(kind, "_Options", None)
    if options is not None:
        missing += [name for name in ("_devices", "_timeout") if not hasattr(options, name)]
    return missing


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
        with _without_watchdog():
            return dist.ProcessGroupNCCL(store, member.rank, member.size, member.timeout)

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


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """A group that is made meanwhile has no watchdog.

    A watchdog ends the whole process when another member dies or is late. Without it, a work tells
    that it failed, and what waits for it has its own time limit. Torch takes this from the
    environment only, when a group is made. The user's own groups keep their watchdog.
    """
    with _environment_lock:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before


def name_interface(address: str) -> None:
    """Have NCCL use the interface of ``address``; it takes that from the environment only.

    Does nothing if the user has named an interface. Nor for loopback: NCCL reads the variable once
    in a process, and later groups may need the network.
    """
    interface = interface_of(address)
    if interface not in (None, "lo"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
