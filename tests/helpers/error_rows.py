"""An error as a row of a table, and the check that its message says what it has to."""

from __future__ import annotations

import atexit
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

import distcollect as dc

CARTPOLE: dict[str, Any] = {"create_env_fn": "CartPole-v1", "frames_per_batch": 4}
RPC: dict[str, Any] = {**CARTPOLE, "num_workers": 2}


def sync(**given: Any) -> dc.SyncDataCollector:
    return dc.SyncDataCollector(**{**CARTPOLE, **given})


def rpc(**given: Any) -> dc.RPCDataCollector:
    return dc.RPCDataCollector(**{**RPC, **given})


def with_env(use: Callable[[], Any], **variables: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return use()


TAKEN = socket.create_server(("127.0.0.1", 0))  # a port that is in use
atexit.register(TAKEN.close)


PORT = TAKEN.getsockname()[1]
Row = tuple[Callable[[], Any], type[Exception], str, str]
ARGUMENT, KIND, STATE = dc.ArgumentError, dc.ArgumentTypeError, dc.CollectorStateError
said: list[str] = []


def check(row: Row) -> None:
    provoke, kind, value, remedy = row
    with pytest.raises(kind) as caught:
        provoke()
    message = str(caught.value)
    said.append(message)
    assert isinstance(caught.value, dc.DistCollectError)
    assert re.search(value, message, re.DOTALL), message
    assert re.search(remedy, message, re.DOTALL), message
