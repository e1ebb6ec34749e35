"""The token shows in no command line, log or environment of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import distcollect as dc

SECRET = "e9d1a2-nobody-may-see-this"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(SECRET + "\n")
    monkeypatch.setenv("DISTCOLLECT_TOKEN_FILE", str(path))
    return path


def command_lines() -> str:
    """What ``ps`` shows of all processes."""
    lines = []
    for folder in Path("/proc").iterdir():
        try:
            lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def test_the_token_shows_nowhere(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in ps, not in a log, not in a worker's environment."""
    caplog.set_level(logging.DEBUG, "distcollect")
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=8, num_workers=1) as collector:
        collector.next()
        [process] = collector._workers._processes.values()
        assert process.connection is not None
        pid = process.connection.hello["pid"]
        assert "json.loads" in Path(f"/proc/{pid}/cmdline").read_text()  # that's it
        assert SECRET not in command_lines()
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert SECRET not in str(process.connection.hello)
    assert SECRET not in caplog.text
