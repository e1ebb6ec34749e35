"""Fixtures that check which processes a test starts and what it leaves behind."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from helpers import launching
from helpers.marked import Marked
from helpers.paths import TESTS
from helpers.transports import WITHOUT_RPC

if TYPE_CHECKING:
    from helpers.hosts import Hosts

# The same few examples each time; --hypothesis-profile=long tries many, other ones each time.
_common = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}
hypothesis.settings.register_profile(
    "short", max_examples=12, stateful_step_count=12, derandomize=True, **_common
)
hypothesis.settings.register_profile(
    "long", max_examples=1000, stateful_step_count=40, print_blob=True, **_common
)
hypothesis.settings.load_profile("short")

# These tests, and the processes that they start, then work as with a torch without RPC.
if WITHOUT_RPC:
    without_rpc = TESTS / "helpers" / "without_rpc"
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{without_rpc}{os.pathsep}{before}"
    runpy.run_path(str(without_rpc / "sitecustomize.py"))

_started: list[str] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder; leave out slow ones unless they are asked for."""
    for item in items:
        item.add_marker(getattr(pytest.mark, _folder(item.path)))
    if "slow" not in config.option.markexpr and not any("::" in arg for arg in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


def _audit(event: str, args: tuple[object, ...]) -> None:
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"} and not _imports():
        _started.append(f"{event} {args[:2]}")


def _imports() -> bool:
    """Whether a module is being imported now: some run a program to inspect the machine."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False


def _spawn(*args: object) -> int:
    """Replaces what multiprocessing spawns processes with, which raises no audit event."""
    if "resource_tracker" not in str(args[1]):  # Python's own, for named semaphores
        _started.append(f"spawn {args[:2]}")
    return _real_spawn(*args)


sys.addaudithook(_audit)
_real_spawn = multiprocessing.util.spawnv_passfds
multiprocessing.util.spawnv_passfds = _spawn


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a token, which processes are told of."""
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("e9d1a2-nobody-may-see-this\n")
    monkeypatch.setenv("DISTCOLLECT_TOKEN_FILE", str(path))
    return path


@pytest.fixture(autouse=True)
def _one_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests in unit/ and loopback/ start no process."""
    before = len(_started)
    yield
    folder = _folder(request.path)
    if folder in ("unit", "loopback"):
        assert _started[before:] == [], f"move this test out of {folder}/: it starts a process"


@pytest.fixture(autouse=True)
def _default_start_method() -> None:
    """Each test starts processes as Python does by default, whatever was imported before it.

    Importing TorchRL makes ``multiprocessing`` spawn processes, each of which imports torch again.
    """
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """A mark in the environment of all processes started from now on; kills them at the end."""
    mark = Marked()
    monkeypatch.setenv(*mark.variable)
    yield mark
    mark.kill()


@pytest.fixture(autouse=True)
def _no_open_pipes() -> Iterator[None]:
    """A test that failed leaves no pipe open, of which a warning would fail another test."""
    yield
    launching.end_all()


@pytest.fixture
def started() -> Callable[[], list[str]]:
    """Returns the processes that were started since the test began."""
    before = len(_started)
    return lambda: _started[before:]


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Hosts]:
    """Hosts 1, 2 and 3, which are network namespaces on this machine."""
    from helpers.hosts import Hosts  # noqa: PLC0415 - few tests need it

    hosts = Hosts()
    try:
        hosts.__enter__()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine can't make network namespaces: {error}")
    try:
        yield hosts
    finally:
        hosts.__exit__()
