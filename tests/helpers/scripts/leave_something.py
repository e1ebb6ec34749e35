"""A training script whose objects hang when they are destroyed, holding the interpreter lock.

    leave_something.py WHAT

WHAT: "variable": a variable of main(); "exit": the same, and main() ends by sys.exit(3);
"global": a variable of the script; "group": main() leaves gathered tensors that threads of its
process group still hold; "nothing": none of these.
"""

from __future__ import annotations

import ctypes
import sys

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distcollect as dc

WHAT = sys.argv[1]


class Hangs:
    def __del__(self):
        ctypes.PyDLL(None).pause()


def main():
    if WHAT == "group":
        # The main thread keeps the lock while it doesn't wait.
        sys.setswitchinterval(1000)
        dist.init_process_group("gloo")
        trained = DistributedDataParallel(nn.Linear(2, 2))
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, sum(p.numel() for p in trained.parameters()))
        print("gathered", gathered, flush=True)
        return
    hangs = Hangs() if WHAT in {"variable", "exit"} else None
    if WHAT == "exit":
        sys.exit(3)
    print("main ends with", hangs)  # not flushed


hangs_later = Hangs() if WHAT == "global" else None

if __name__ == "__main__":
    dc.run(main, num_trainers=2 if WHAT == "group" else 1)
