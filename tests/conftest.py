"""Fixtures that watch what a test starts and leaves behind."""

from __future__ import annotations

import multiprocessing.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from helpers.marked import Marked
from helpers.paths import TESTBED, TESTS

if TYPE_CHECKING:
    from chaos.hosts import Hosts

_started: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, which says what it needs."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(getattr(pytest.mark, folder))


def _audit(event: str, args: tuple[object, ...]) -> None:
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"} and not _imports():
        _started.append(f"{event} {args[:2]}")


def _imports() -> bool:
    """Whether a module is being imported: some look at the machine with a program."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False


def _spawn(*args: object) -> int:
    """What multiprocessing starts its spawned processes with; it raises no audit event."""
    _started.append(f"spawn {args[:1]}")
    return _real_spawn(*args)


sys.addaudithook(_audit)
_real_spawn = multiprocessing.util.spawnv_passfds
multiprocessing.util.spawnv_passfds = _spawn


@pytest.fixture(autouse=True)
def _one_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests in unit/ and loopback/ start no process."""
    before = len(_started)
    yield
    folder = request.path.relative_to(TESTS).parts[0]
    if folder in ("unit", "loopback"):
        assert _started[before:] == [], f"move this test out of {folder}/: it starts a process"


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
