"""The backends of process groups that were registered with torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed


def creator(name: str) -> Callable[..., Any] | None:
    """Return the function that makes a process group of a registered backend, or None.

    It takes a store, the rank, the number of members and a timeout. What torch brings itself, such
    as "gloo", is not registered.
    """
    backend: Any = getattr(torch.distributed, "Backend", None)
    # There is no public way to a registered function but the default process group.
    plugin = getattr(backend, "_plugins", {}).get(name.upper())
    if plugin is None or plugin.extended_api:
        return None
    made: Callable[..., Any] = plugin.creator_fn
    return made


def device_types(name: str) -> list[str]:
    """Return the kinds of devices whose tensors a registered backend takes: "cpu", "cuda"."""
    backend: Any = torch.distributed.Backend
    return list(backend.backend_capability.get(name.lower(), ()))
