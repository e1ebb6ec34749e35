"""Starts two workers that hang; see test_local_processes.py."""

from __future__ import annotations

import os
import sys
import time

from distcollect.launch.local_processes import LocalProcesses, ProcessEvents

folder, *todo = sys.argv[1:]
processes = LocalProcesses(ProcessEvents())
for worker_id in (0, 1):
    processes.spawn(worker_id, 0, {}, {"PYTHONPATH": folder})
forked = []
if "fork" in todo:
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(1000)
    forked.append(child)
print(*forked, flush=True)
if "close" in todo:
    processes.close(0)
    os._exit(0)
time.sleep(1000)
