"""Reads the storages of TorchRL's replay buffers. This module does not import torchrl."""

from __future__ import annotations

import sys
from typing import Any

from distcollect.errors import SpaceError
from distcollect.rollout.layout import Layout
from distcollect.rollout.spaces import can_be_indexed

_STORAGES = "torchrl.data.replay_buffers.storages"


def storage_of(buffer: object) -> Any:
    """The storage of one of TorchRL's buffers; None: it is a buffer of another kind.

    A user's own may well have an attribute of this name: an array, say, which has dimensions too.
    """
    return _storage(buffer, "Storage")


def check_can_hold(buffer: object, layout: Layout) -> None:
    """Raise SpaceError if ``buffer`` is one of TorchRL's that can't hold the frames.

    TorchRL writes frames to one tensor by index, which torch can't do for some dtypes.
    """
    storage = _storage(buffer, "TensorStorage")
    for leaf in () if storage is None else layout.per_frame:
        if not can_be_indexed(leaf.dtype):
            raise SpaceError(
                f"replay_buffer: its {type(storage).__name__} can't hold {leaf}, as torch can't "
                "write that dtype by index: use TorchRL's ListStorage, or convert the entry to "
                "another dtype in a wrapper of the env"
            )


def _storage(buffer: object, kind: str) -> Any:
    storage = getattr(buffer, "storage", None)
    known = getattr(sys.modules.get(_STORAGES), kind, ())
    return storage if isinstance(storage, known) else None
