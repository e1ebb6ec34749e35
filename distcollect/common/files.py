"""Files that are never seen half written."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
