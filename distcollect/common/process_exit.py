"""The ends of processes, in words."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessExit:
    """The end of a worker process.

    Attributes:
        code: its exit code, -N if signal N ended it.
        stepped: frames that it had stepped.
        reason: why the watchdog ended it, or why it could not be started; "" otherwise.
    """

    code: int
    stepped: int
    reason: str = ""


# Torch's C++ side takes whatever comes to an RPC port for a message of its own.
STRAY_CONNECTION = (
    "with transport='rpc', torch ends a process in this way when another program, such as a port "
    'scanner, connects to its port: see "Torch\'s ports" on the page Security'
)


def describe_exit(code: int, *, may_use_rpc: bool = True) -> str:
    """Put a return code of :mod:`subprocess` in words: 'exit code 1', or 'killed by SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    if may_use_rpc and -code in (signal.SIGABRT, signal.SIGSEGV):
        return f"killed by {name} (if no native code of yours crashed: {STRAY_CONNECTION})"
    return f"killed by {name}"
