"""Which transports the tests have: all, or those of a torch without RPC."""

from __future__ import annotations

import os

import pytest

WITHOUT_RPC = os.environ.get("DISTCOLLECT_TEST_WITHOUT_RPC") == "1"
TRANSPORTS = ["tcp"] if WITHOUT_RPC else ["rpc", "tcp"]
needs_rpc = pytest.mark.skipif(WITHOUT_RPC, reason="is about torch's RPC")
