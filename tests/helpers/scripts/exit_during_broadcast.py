"""Gives up a broadcast, and ends; the other member dies while the interpreter shuts down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from distcollect.weights.process_groups import GroupMember, Groups

dist: Any = torch.distributed
HOST = "127.0.0.1"
SMALL, LARGE = 1 << 20, 1 << 26


class EndsLate:
    """Kills a process when the interpreter destroys its last objects."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._kill, self._signal, self._sleep = os.kill, signal.SIGKILL, time.sleep

    def __del__(self) -> None:
        self._kill(self._pid, self._signal)
        self._sleep(0.5)  # Gloo's thread sees it


def join(rank: int, store: Any) -> tuple[Groups, GroupMember]:
    """Join the group of two."""
    groups = Groups()
    place = GroupMember("group", rank, 2, 60.0, "gloo")
    groups.join(place, store, HOST)
    return groups, place


def be_peer(port: int) -> None:
    """Take part in one broadcast, and in no other."""
    groups, place = join(1, dist.TCPStore(HOST, port, is_master=False))
    print("joined", flush=True)
    groups.broadcast(place, torch.zeros(SMALL, dtype=torch.uint8))
    signal.pause()


def main() -> None:
    """Broadcast twice."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(store.port)]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    # Gloo of torch 2.8 prints a line of its own before.
    assert any(line == "joined\n" for line in peer.stdout)
    groups, place = join(0, store)
    groups.broadcast(place, torch.zeros(SMALL, dtype=torch.uint8))
    large = torch.zeros(LARGE, dtype=torch.uint8)
    threading.Timer(0.2, groups.drop, [place.group]).start()
    try:
        groups.broadcast(place, large)
    except RuntimeError as error:
        print(error, flush=True)
    sys.modules["ends_late"] = EndsLate(peer.pid)  # type: ignore[assignment]


if __name__ == "__main__":
    be_peer(int(sys.argv[1])) if len(sys.argv) > 1 else main()
