"""Which GPU a process uses."""

from __future__ import annotations

import torch


def numbered(device: torch.device | None) -> torch.device | None:
    """Give ``device`` its number, so that ``cuda`` and ``cuda:0`` compare as equal where they are.

    Left as it is: the CPU, and a GPU that this process doesn't have.
    """
    if device is None or device.type != "cuda" or device.index is not None:
        return device
    return (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.device_count() else device
    )


def use(device: torch.device | None) -> None:
    """Make ``device`` the GPU that "cuda" means on this thread, if it is one and names its number.

    Does nothing for a GPU that this process doesn't have: what uses it first raises a better error.
    """
    if device is None or device.type != "cuda" or device.index is None:
        return
    if device.index < torch.cuda.device_count():
        torch.cuda.set_device(device)
