"""A script that submits itself to SLURM; prints a line of JSON at its end.

Arguments: the run folder, and further options of ``distcollect submit``.
"""

from __future__ import annotations

import json
import sys

import torch
from train_submitted import Paced, Policy

from distcollect import Faults, RPCDataCollector, submitit_delayed_launcher

TRAINER = {
    "timeout_min": 10,
    "slurm_time": "30:00",
    "slurm_partition": "main",
    "slurm_cpus_per_task": 1,
    "slurm_gpus_per_node": 0,
}
WORKERS = {
    "timeout_min": 20,
    "slurm_partition": "main",
    "slurm_ntasks_per_node": 1,
    "slurm_comment": "rollouts",
}


@submitit_delayed_launcher(
    num_jobs=2,
    framework="rpc",
    tcpport=1234,
    submitit_main_conf=TRAINER,
    submitit_collection_conf=WORKERS,
    submit_options=["--trust-folder", "--run-folder", *sys.argv[1:]],
)
def main():
    torch.manual_seed(0)
    collector = RPCDataCollector(
        [Paced, Paced],
        Policy(),
        launcher="submitit_delayed",
        tcp_port=1234,
        frames_per_batch=80,
        total_frames=240,
        sync=True,
        # SLURM may start one job of workers long after the other.
        faults=Faults(min_workers=2),
    )
    frames, workers = 0, set()
    for batch in collector:
        frames += batch.numel()
        workers.update(batch["collector", "worker_id"].flatten().tolist())
    collector.shutdown()
    print(json.dumps({"event": "done", "frames": frames, "workers": sorted(workers)}))


if __name__ == "__main__":
    main()
