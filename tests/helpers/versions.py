"""Versions of the packages that are installed."""

from __future__ import annotations

from importlib.metadata import version


def version_of(package: str) -> tuple[int, int]:
    """The first two numbers of a package's version: (1, 4) for 1.4.0."""
    major, minor, *_ = version(package).split(".")
    return int(major), int(minor)
