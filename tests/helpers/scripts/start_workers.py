"""Starts two workers that hang, and forks a child that does; see test_local_processes.py."""

from __future__ import annotations

import os
import sys
import time

from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.local_processes import LocalProcesses
from distcollect.net.messages import Spawn, TrainerAddress, WorkerSettings

folder, *todo = sys.argv[1:]
processes = LocalProcesses(lambda _: None)
for worker_id in (0, 1):
    wanted = Spawn(worker_id, 0, WorkerSettings(), {"PYTHONPATH": folder})
    processes.spawn(wanted, TrainerAddress("127.0.0.1", 0, ""), CpuPlacement(None, 1))
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(1000)
print(child, flush=True)
if todo == ["close"]:
    processes.close(0)
    os._exit(0)
time.sleep(1000)
