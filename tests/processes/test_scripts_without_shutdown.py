"""A script that ends without shutdown() leaves nothing of what its envs started, and a ledger."""

from __future__ import annotations

import pytest
from helpers.marked import Marked
from helpers.programs import run_python

SCRIPT = """
import logging, subprocess, sys
import gymnasium as gym
import distcollect as dc

class Starting(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.program = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)

    def close(self):
        self.program.kill()
        self.program.wait()
        super().close()

class Buffer:
    def extend(self, batch):
        pass

logging.basicConfig(level=logging.INFO)
how = sys.argv[1]
if how == "background":
    collector = dc.SyncDataCollector(Starting, frames_per_batch=8, replay_buffer=Buffer())
    collector.start()
else:
    collector = getattr(dc, how)(Starting, frames_per_batch=8)
    collector.next()
    collector.evaluate(1)
"""


@pytest.mark.parametrize("how", ["SyncDataCollector", "background", "aSyncDataCollector"])
def test_nothing_is_left(marked: Marked, how: str) -> None:
    done = run_python("-c", SCRIPT, how, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert ("where the frames went" in done.stderr) == (how == "aSyncDataCollector")
    assert marked.gone(), marked.left()
