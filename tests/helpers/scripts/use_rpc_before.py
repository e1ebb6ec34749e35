"""Uses torch's RPC as rank 1 of two, ends it, and then makes a collector with a worker."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed import rpc  # noqa: TID251 - as a user may

import distcollect as dc


def take_part(name, rank, file):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


def main():
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        given = ("other", 0, Path(folder) / "store")
        other = multiprocessing.get_context("spawn").Process(target=take_part, args=given)
        other.start()
        take_part("this", 1, given[2])
        other.join()

    try:
        dc.RPCDataCollector("CartPole-v1", frames_per_batch=16, num_workers=1).shutdown()
    except dc.CollectorStateError as error:
        sys.exit(f"CollectorStateError: {error}")


if __name__ == "__main__":
    main()
