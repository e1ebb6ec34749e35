"""Pytest can collect all folders in one run."""

from __future__ import annotations

from collections import Counter

from helpers.paths import ROOT


def test_no_two_files_have_the_same_name() -> None:
    """The lanes of CI would not notice: each collects some of the folders."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
