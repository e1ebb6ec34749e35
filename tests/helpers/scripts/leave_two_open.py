"""Leaves two collectors open, whose workers collect.

    leave_two_open.py END

END: "exit": end at once; otherwise collect until a signal comes.
"""

from __future__ import annotations

import sys

import distcollect as dc

first = dc.MultiSyncDataCollector("CartPole-v1", num_workers=1, frames_per_batch=16)
second = dc.MultiaSyncDataCollector("Pendulum-v1", num_workers=1, frames_per_batch=16)
for running in (first, second):
    running.next()
print("running", flush=True)
while sys.argv[1] != "exit":
    first.next()
    second.next()
