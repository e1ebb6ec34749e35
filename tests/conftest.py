"""Fixtures that watch what a test starts and leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from scripts.marked import Marked

_started: list[str] = []


def _audit(event: str, args: tuple[object, ...]) -> None:
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}:
        _started.append(f"{event} {args[:2]}")


sys.addaudithook(_audit)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """A mark that all processes started from here on carry; kills what a failed test left."""
    mark = Marked()
    monkeypatch.setenv(*mark.variable)
    yield mark
    mark.kill()


@pytest.fixture
def started() -> Callable[[], list[str]]:
    """Tells which processes were started since the test began."""
    before = len(_started)
    return lambda: _started[before:]
