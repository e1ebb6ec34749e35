"""Collects under any launcher while a worker is lost and comes back; see test_launch.py.

lose_a_worker.py kill      the trainer kills worker 1 itself
lose_a_worker.py unplug    the host of worker 1 is unplugged when "running" is printed, and
                           plugged in again when "lost" is
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.envs import ProcessIdEnv

import distcollect as dc


def main():
    with dc.RPCDataCollector(ProcessIdEnv, frames_per_batch=20) as collector:
        pids = {}

        def until(holds):
            while not holds():
                batch = collector.next(timeout_s=60)
                worker_id = int(batch["collector", "worker_id"][0, 0])
                pids[worker_id] = int(batch["observation"][0, 0, 0])

        until(lambda: len(pids) == 2)
        print("running", flush=True)
        if sys.argv[1] == "kill":
            os.kill(pids[1], signal.SIGKILL)
        until(lambda: collector.num_workers == 1)
        print("lost", flush=True)
        pids.pop(1, None)
        until(lambda: collector.num_workers == 2)
        until(lambda: 1 in pids)
    report = collector.ledger
    print(report)
    assert report.total.open == 0
    print("mended", flush=True)


if __name__ == "__main__":
    dc.run(main)
