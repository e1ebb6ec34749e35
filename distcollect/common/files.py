"""Files that are never seen half written, and that one process writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_held: set[Path] = set()  # locks of this process, whose descriptors stay open until it ends


@contextlib.contextmanager
def replacing(path: Path, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` once it is complete and on the disk.

    If the body raises, ``path`` stays as it was.

    Args:
        path: the file to replace, or to make.
        draft: where to write, in the same folder; None: as :func:`draft_of` says.

    Raises:
        OSError: the file can't be written.
    """
    draft = draft or draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def draft_of(path: Path) -> Path:
    """Where this process writes what replaces ``path``.

    Drafts that processes of this host have left which were killed meanwhile are removed.
    """
    start = f".{path.name}.{socket.gethostname()}."
    for draft in path.parent.iterdir():
        pid = draft.name.removeprefix(start)
        if pid != draft.name and pid.isdecimal() and not _is_alive(int(pid)):
            draft.unlink(missing_ok=True)
    return path.with_name(f"{start}{os.getpid()}")


def hold(path: Path) -> tuple[str, str]:
    """Hold ``path`` until this process ends, by a lock on a file beside it.

    Where files can't be locked, it does nothing. Forked children don't inherit the lock.

    Returns:
        The pid and the host of the process that holds it instead; "" and "" if none is known.
    """
    lock = path.resolve().with_name(f".{path.name}.lock")
    if lock in _held:
        return "", ""  # to close a second descriptor would end the lock
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError:
        return "", ""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()} {socket.gethostname()}".encode())
        _held.add(lock)
    except BlockingIOError:
        pid, _, host = os.read(fd, 300).decode(errors="replace").partition(" ")
        os.close(fd)
        return pid, host
    except OSError:
        os.close(fd)
    return "", ""


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
