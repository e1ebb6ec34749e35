"""Ends while a broadcast that was given up is in a call of torch, which needs no lock for long."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from distcollect.weights.process_groups import GroupMember, Groups

dist: Any = torch.distributed
HOST = "127.0.0.1"
# The call takes this long; the interpreter shuts down meanwhile, unless it waits for the call.
CALL_S = 0.5

waiting = threading.Event()


class Work:
    """A broadcast that has failed."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        waiting.set()
        self._store.get("nothing")  # in C++, without the interpreter's lock


class Group:
    """A process group whose broadcasts fail."""

    def __init__(self, store: Any, *_: Any) -> None:
        store.set_timeout(timedelta(seconds=CALL_S))
        self._work = Work(store)

    def broadcast(self, *_: Any) -> Work:
        return self._work

    def abort(self) -> None:
        """Nothing to abort."""


class EndsLate:
    """Keeps the interpreter when it destroys its last objects."""

    def __init__(self) -> None:
        self._sleep = time.sleep

    def __del__(self) -> None:
        self._sleep(3 * CALL_S)


def main() -> None:
    """Give up a broadcast."""
    dist.Backend.register_backend("failing", Group, devices=["cpu"])
    groups = Groups()
    member = GroupMember("group", 0, 2, 60.0, "failing")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    groups.join(member, store, HOST)

    def give_up() -> None:
        waiting.wait(60)
        groups.drop(member.group)

    threading.Thread(target=give_up).start()
    try:
        groups.broadcast(member, torch.zeros(4, dtype=torch.uint8))
    except RuntimeError as error:
        print(error, flush=True)
    sys.modules["ends_late"] = EndsLate()  # type: ignore[assignment]


if __name__ == "__main__":
    main()
