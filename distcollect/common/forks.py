"""Things that belong to one process alone, and not to the children that it forks.

A forked child (a DataLoader's, an AsyncVectorEnv's) has a copy of every object. If it leaves by
``sys.exit()`` or an exception, it runs the same ``with`` blocks, finalizers and exit functions as
its parent. What ends processes, or closes what both share, asks here whose it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any


class Owner:
    """The process that makes this object.

    Attributes:
        pid: its id.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if this process is the owner, and not a forked child of it."""
        return os.getpid() == self.pid


def only_here(function: Callable[..., object]) -> Callable[..., None]:
    """Return ``function`` for this process; in forked children it does nothing."""
    owner = Owner()

    def call(*args: Any) -> None:
        if owner.is_here:
            function(*args)

    return call


def keep_for_ever(native: object) -> None:
    """Never destroy this object, not even when the interpreter exits.

    For objects of torch that own threads: their destructors wait for these threads.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
