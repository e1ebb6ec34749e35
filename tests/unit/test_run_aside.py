"""A function that is called on a thread of its own, where there can be one."""

from __future__ import annotations

import threading

import pytest

from distcollect.common.threads import run_aside


def test_at_exit_it_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    called: list[int] = []
    assert run_aside(called.append, 3) is None
    assert called == [3]
