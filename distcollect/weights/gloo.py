"""Torch's Gloo groups, as broadcasts of weights need them: by private parts of torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# Torch declares no types for its process groups.
dist: Any = torch.distributed

# Gloo waits five times as long for a member's connection. All members have joined by then, and if
# one has died since, the others are told to wait no longer; this limit is for when that message
# doesn't arrive.
_CONNECT_TIMEOUT_S = 2.0


def missing_gloo_parts() -> list[str]:
    """Names of the private parts of torch that :func:`gloo_group` needs and this torch lacks."""
    kind = getattr(dist, "ProcessGroupGloo", None)
    if kind is None:
        return ["ProcessGroupGloo"]
    needed = ((kind, "_Options"), (kind, "create_device"))
    missing = [name for owner, name in needed if not hasattr(owner, name)]
    options = getattr(kind, "_Options", None)
    if options is not None:
        missing += [name for name in ("_devices", "_timeout") if not hasattr(options, name)]
    return missing


def gloo_group(store: Any, rank: int, size: int, address: str) -> Any:
    """Join a Gloo group, without waiting for the other members.

    Args:
        store: where the members find each other's addresses.
        rank: of this process in the group.
        size: how many members it has.
        address: of the interface to use.
    """
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - there is no public way
    # The address names the interface. Connections are made on first use, as a broadcast needs a
    # tree of them, not all pairs; so this waits for no other member.
    options._devices = [  # noqa: SLF001
        dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    ]
    options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, options)
