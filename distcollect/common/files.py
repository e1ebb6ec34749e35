"""Files that are never seen half written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` once it is complete and on the disk.

    If the body raises, ``path`` stays as it was.

    Args:
        path: the file to replace, or to make.
        draft: where to write, in the same folder; None: a name with this process's id.

    Raises:
        OSError: the file can't be written.
    """
    draft = draft or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
