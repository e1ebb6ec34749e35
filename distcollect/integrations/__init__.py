"""Other projects that distcollect works with, each in a place of its own.

The packages below :mod:`distcollect.collectors` name none of them. They look up what they need by
what it is for, so that it is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

# What it is for, and the module or the name in one that does it.
_ENTRY_POINTS = {
    "ray job": "distcollect.integrations.ray.job",
}


def load(purpose: str) -> Any:
    """Import the module, or the name in a module (MODULE:NAME), that serves this purpose."""
    module, _, name = _ENTRY_POINTS[purpose].partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
