"""For tests: no process that finds this folder on its path can import what uses torch's RPC.

Torch itself imports ``torch.distributed.rpc``, so that one can't be missing.
"""

from __future__ import annotations

import sys
from typing import Any

_PREFIX = "distcollect.transport.rpc"


class _Missing:
    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name.startswith(_PREFIX):
            raise ImportError(f"this torch has no RPC, for {name}")


sys.meta_path.insert(0, _Missing())
