"""Fixtures that watch what a test starts and leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from helpers.paths import TESTBED, TESTS
from helpers.scripts.marked import Marked

if TYPE_CHECKING:
    from chaos.hosts import Hosts

_started: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, which says what it needs."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, folder))


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


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    """Hosts 1, 2 and 3, of names of their own, that are network namespaces on this machine."""
    from chaos.hosts import Hosts  # noqa: PLC0415 - few tests need it

    hosts = Hosts(TESTBED)
    try:
        hosts.__enter__()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine can't make network namespaces: {error}")
    try:
        yield hosts
    finally:
        hosts.__exit__()
