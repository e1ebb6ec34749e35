"""A cgroup that grants one core."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A real one, of version 1 or 2, that grants one core."""
    name = f"distcollect-{uuid.uuid4().hex[:8]}"
    for top, files in (
        ("cpu", {"cpu.cfs_period_us": "50000", "cpu.cfs_quota_us": "50000"}),
        (".", {"cpu.max": "50000 50000"}),
    ):
        folder = Path("/sys/fs/cgroup") / top / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, value in files.items():
                (folder / file).write_text(value)
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no cgroup with the cpu controller can be made here: needs root")
