"""The states of the global random generators: torch's, NumPy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the states of all of them, in plain values and tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - for envs that use it
    values = numpy_state["state"]
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    # Asking for the number of GPUs would initialize CUDA where nobody uses it.
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if has_gpu else [],
        "numpy": {**numpy_state, "state": plain},
        "python": random.getstate(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue from such states; those of GPUs only if this process has as many."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    random.setstate(states["python"])


@contextlib.contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the states at the end: a user's draws stay the same."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
