"""Keeps the global random generators as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from distcollect.common import gpus


@contextlib.contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore torch's, NumPy's and Python's global generators: a user's draws stay the same."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - for envs that still use it
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=gpus.in_use()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
