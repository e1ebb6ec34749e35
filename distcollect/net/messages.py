"""The messages between a trainer, its supervisors and its worker processes.

::

    worker process                          trainer
                    (the handshake: see handshake.py)
    WorkerHello              ─────────▶
                             ◀─────────     WorkerWelcome, or Refused
    Reachable                ─────────▶
    Leaving                  ─────────▶
                             ◀─────────     Stop, then Exit

    supervisor                              trainer
                    (the handshake: see handshake.py)
    SupervisorHello          ─────────▶
                             ◀─────────     SupervisorWelcome, or Refused
                             ◀─────────     Spawn, Kill
    Exited, MemoryExceeded   ─────────▶
                             ◀─────────     Goodbye

A message travels as a JSON object: its class's name under "message", and its fields. An unknown
message, an unknown, missing or wrongly typed field is refused.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from distcollect.common.memory_segment import Segment, own_network
from distcollect.common.process_exit import ProcessExit
from distcollect.errors import LaunchError, slot_name
from distcollect.net.framing import with_length
from distcollect.version import __version__

M = TypeVar("M")

PROTOCOL = 10

# Importing them takes seconds, and a supervisor needs nothing of them but their versions.
_TORCH, _TENSORDICT = map(importlib.metadata.version, ("torch", "tensordict"))


def versions() -> dict[str, str]:
    """Return what has to match for objects and messages to travel between two processes."""
    return {
        "distcollect": __version__,
        "protocol": str(PROTOCOL),
        "python": "{}.{}".format(*sys.version_info[:2]),
        "torch": _minor(_TORCH),
        "tensordict": _minor(_TENSORDICT),
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class Message:
    """A message; its subclasses are dataclasses, and register themselves by their names."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True)
class Hello(Message):
    """The first message of a process that joins, after the handshake.

    The fields stay the same from one protocol version to the next: so a trainer can say which
    process it refused because of its versions.

    Attributes:
        role: what the process is, for people.
        host: the name of its host.
        pid: its process id there.
    """

    role: ClassVar[str] = "process"

    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, kw_only=True)
class WorkerHello(Hello):
    """A worker process joins, as the process with number ``incarnation`` in slot ``worker_id``."""

    role = "worker"

    worker_id: int
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class SupervisorHello(Hello):
    """A supervisor joins.

    Attributes:
        rank: its rank in the launch; None outside of a launch.
        network: equal for the processes that an inference server on its host can serve.
    """

    rank: int | None
    network: str = field(default_factory=own_network)


@dataclass(frozen=True)
class Refused(Message):
    """The process may not join; it ends."""

    reason: str


@dataclass(frozen=True)
class WorkerWelcome(Message):
    """A worker process has joined, and is to answer the trainer's calls.

    Attributes:
        peer: its id for the transport.
        trainer_memory: a little of the trainer's shared memory.
        transport: the name of the trainer's transport.
        hands_over: other trainers of the run may connect to it, and take rollouts over.
    """

    peer: int
    trainer_memory: Segment | None
    transport: str = "rpc"
    hands_over: bool = False


@dataclass(frozen=True)
class PeerAddress:
    """An address by which a trainer's transport reaches a process.

    Attributes:
        endpoint: where the process listens for calls; "": nowhere.
        memory_sample: a little of its shared memory: if the trainer can map it, neither rollouts
            nor weights are sent. None if the process can't map the memory of a trainer on its host.
    """

    endpoint: str
    memory_sample: Segment | None = None


@dataclass(frozen=True)
class Reachable(Message):
    """The worker's transport can be reached now."""

    address: PeerAddress


@dataclass(frozen=True)
class Leaving(Message):
    """The worker was asked to end, by SIGTERM, and wants to leave in order."""


@dataclass(frozen=True)
class Stop(Message):
    """The worker is to stop stepping and to close its envs, but not to end yet."""


@dataclass(frozen=True)
class Exit(Message):
    """The process is to end, once it has stopped."""


@dataclass(frozen=True)
class SupervisorWelcome(Message):
    """A supervisor has joined; it starts the processes of slot ``worker_id``."""

    worker_id: int


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker process that the trainer decides.

    Attributes:
        collector: the number of its collector among those that are open in the trainer's process,
            counted from 1.
        first_traj_id: the trajectory ids of this life of the run begin here.
        leave_timeout_s: how long it may take to leave.
        start_timeout_s: by then after its start it has to be ready.
        step_timeout_s: its watchdog ends it when no step is finished for so long; None: never.
        max_bytes: its watchdog reports more memory than this; None: never.
    """

    collector: int = 1
    first_traj_id: int = 0
    leave_timeout_s: float = 0.0
    start_timeout_s: float = 0.0
    step_timeout_s: float | None = None
    max_bytes: int | None = None


def worker_name(worker_id: int, collector: int) -> str:
    """Name a worker in the log; a collector that is open alone is not named."""
    return slot_name(worker_id) + (f" of collector {collector}" if collector > 1 else "")


@dataclass(frozen=True)
class ProcessMessage(Message):
    """A message about a process of a supervisor.

    Attributes:
        worker_id: its slot.
        incarnation: its number in this slot, counted from 0.
    """

    worker_id: int
    incarnation: int


@dataclass(frozen=True)
class Spawn(ProcessMessage):
    """The supervisor is to start a worker process.

    Attributes:
        settings: see :class:`WorkerSettings`.
        env: environment variables to add to the supervisor's own.
    """

    settings: WorkerSettings
    env: dict[str, str]

    @property
    def name(self) -> str:
        """The worker's name in the log."""
        return worker_name(self.worker_id, self.settings.collector)


@dataclass(frozen=True)
class Kill(ProcessMessage):
    """The supervisor is to end a worker process at once.

    Attributes:
        why: what to log; "": nothing, as the process ends by itself.
    """

    why: str = ""


@dataclass(frozen=True)
class Exited(ProcessMessage):
    """A process that the supervisor was to start has ended, or could not be started."""

    exit: ProcessExit


@dataclass(frozen=True)
class MemoryExceeded(ProcessMessage):
    """A process of the supervisor takes more memory than it may."""

    num_bytes: int


@dataclass(frozen=True)
class Goodbye(Message):
    """The trainer needs the supervisor no more.

    Attributes:
        failed: the trainer ends by an error.
        resumes: the trainer will be started again, and the supervisor is to wait for it.
    """

    failed: bool = False
    resumes: bool = False


@dataclass(frozen=True)
class TrainerAddress:
    """Where a trainer's join server listens, and the token to prove there."""

    host: str
    port: int
    token: str = field(repr=False)  # errors may show an address


@dataclass(frozen=True)
class WorkerBoot:
    """A worker's start, as it reads it from a file without a name, where no ``ps`` sees the token.

    Attributes:
        wanted: what the trainer wants.
        trainer: where to join.
        num_threads: for torch to use.
        counters_fd: descriptor of its :class:`~distcollect.common.step_counter.SharedStepCounter`.
        control_fd: descriptor of its connection with the trainer; -1: it has to connect.
        host_cores: those that the workers of the process that starts it may keep busy.
        sys_path: of the process that starts it.
        authkey: of the same, in hexadecimal, as :mod:`multiprocessing` gives it to the processes
            that it starts.
    """

    wanted: Spawn
    trainer: TrainerAddress
    num_threads: int = 1
    counters_fd: int = -1
    control_fd: int = -1
    host_cores: tuple[int, ...] = ()
    sys_path: tuple[str, ...] = ()
    authkey: str = field(default="", repr=False)


def to_bytes(message: Message) -> bytes:
    """Return a message as a frame's bytes, without their length."""
    assert is_dataclass(message)
    return json.dumps({"message": type(message).__name__, **asdict(message)}).encode()


def encode(message: Message) -> bytes:
    """Return a message as a whole frame."""
    return with_length(to_bytes(message))


def decode(data: bytes | str) -> Message:
    """Return the message in a frame's bytes.

    Raises:
        LaunchError: there is none, or a field is unknown, missing or of a wrong type.
    """
    try:
        frame = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LaunchError("a frame without JSON: the peer is not part of distcollect") from error
    if not isinstance(frame, dict):
        raise LaunchError("a frame without a JSON object: the peer is not part of distcollect")
    name = frame.pop("message", None)
    kind = Message.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise LaunchError(f"a frame with the unknown message {name!r}")
    message: Message = _record(kind, frame, kind.__name__)
    return message


def decode_as(kind: type[M], data: bytes | str) -> M:
    """Return the message in a frame's bytes, which has to be a ``kind``.

    Raises:
        LaunchError: it is something else; see :func:`decode`.
    """
    message = decode(data)
    if not isinstance(message, kind):
        raise LaunchError(f"a {type(message).__name__} message instead of a {kind.__name__}")
    return message


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def _record(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise LaunchError(f"{where} is no object: {value!r}")
    types = _types(kind)
    for problem, names in (
        ("unknown", value.keys() - types.keys()),
        ("missing", types.keys() - value.keys()),
    ):
        if names:
            raise LaunchError(f"{where} has {problem} fields: {', '.join(sorted(names))}")
    return kind(**{n: _value(types[n], value[n], f"{where}.{n}") for n in types})


def _value(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as the type that a field is declared with."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        kind = next(arg for arg in args if arg is not NoneType)
        origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind, value, where)
    if origin in (tuple, list) and isinstance(value, list):
        make: Callable[[Any], Any] = origin
        return make(_value(args[0], entry, where) for entry in value)
    if origin is dict and isinstance(value, dict):
        return {key: _value(args[1], entry, where) for key, entry in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise LaunchError(f"{where} is {value!r}, not a {getattr(kind, '__name__', kind)}")
    return value
