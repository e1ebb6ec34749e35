"""The clock that all measured times come from."""

from __future__ import annotations

import time

clock_ns = time.perf_counter_ns
