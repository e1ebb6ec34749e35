"""What workers get of the environment while another thread changes it."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from distcollect.launch.zygote import Inheritance


def test_variables_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"DISTCOLLECT_TEST_{i}" for i in range(50)]
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            for name in names:
                os.environ[name] = "1"
            for name in names:
                del os.environ[name]

    monkeypatch.setenv("DISTCOLLECT_TEST", "stays")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing = threading.Thread(target=change)
    changing.start()
    try:
        found = [Inheritance.now().environ for _ in range(1000)]
    finally:
        is_over.set()
        changing.join()
        sys.setswitchinterval(before)
    assert all(variables["DISTCOLLECT_TEST"] == "stays" for variables in found)
