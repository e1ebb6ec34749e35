"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# Envs in threads of this process wait for it. It can't be pickled, so they find it in this module.
test_is_over = threading.Event()


def eventually(
    condition: Callable[[], Any], timeout_s: float = 60.0, about: Callable[[], Any] = lambda: None
) -> None:
    """Wait until ``condition()`` is true; if that takes too long, fail and show ``about()``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.01)
