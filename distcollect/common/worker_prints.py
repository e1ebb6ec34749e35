"""What the worker processes of this host print, while this process has a display on the terminal.

Such a worker writes to a pipe in place of the terminal. A thread of this process shows each line
above the display, with the worker's name: the last ones of a worker that has died too. A worker
waits for this process only when a megabyte of what it printed was not read yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator

from distcollect.common import open_files

_STDERR = 2
_PIPE_BYTES = 1 << 20
_LONGEST_LINE = 1 << 16

expected: list[object] = []  # displays that are on the terminal, or may come there
print_line: Callable[[str], object] | None = None  # by the display that is on the terminal
# Held while a line is printed or the display is drawn: a display that is drawn meanwhile would be
# printed into.
lock = threading.RLock()


@contextlib.contextmanager
def output_streams(name: str, readers: list[threading.Thread]) -> Iterator[tuple[int, int]]:
    """Give a worker descriptors of stdout and stderr: a pipe in place of each terminal.

    Args:
        name: the worker's.
        readers: gets the thread that reads the pipe until all who may print have ended.
    """
    with open_files.output_streams() as streams:
        if not expected or not any(map(os.isatty, streams)):
            yield streams
            return
        source, sink = os.pipe()
        with contextlib.suppress(OSError):  # the user has many pipes
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        reader = threading.Thread(
            target=_read, args=(source, name), name="distcollect-prints", daemon=True
        )
        reader.start()
        readers.append(reader)
        try:
            stdout, stderr = (sink if os.isatty(fd) else fd for fd in streams)
            yield stdout, stderr
        finally:
            os.close(sink)


def _read(source: int, name: str) -> None:
    with open(source, "rb") as lines:
        while line := lines.readline(_LONGEST_LINE):
            text = f"{name}: {line.decode(errors='replace').rstrip()}"
            # If the terminal is gone, a console may raise anything, and the pipe must be read on.
            with contextlib.suppress(Exception), lock:
                if print_line is None:
                    os.write(_STDERR, f"{text}\n".encode())
                else:
                    print_line(text)


def _forget() -> None:
    """In a forked child of this process: the display is its parent's."""
    global lock, print_line
    lock, print_line = threading.RLock(), None
    expected.clear()


os.register_at_fork(after_in_child=_forget)
