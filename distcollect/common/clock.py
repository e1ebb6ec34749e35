"""The clock that all times are taken from."""

from __future__ import annotations

import time

clock_ns = time.perf_counter_ns
