"""A script that ends without shutdown() leaves nothing of what its envs started, and a ledger."""

from __future__ import annotations

import pytest
from helpers.marked import Marked
from helpers.programs import run_python

SCRIPT = """
import logging, subprocess, sys, time
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
how, _, kind = sys.argv[1].rpartition(" ")
if how == "background":
    collector = getattr(dc, kind)(Starting, frames_per_batch=8, replay_buffer=Buffer())
    collector.start()
    while not collector.frames:
        time.sleep(0.01)
    raise ValueError("the user's")
else:
    collector = getattr(dc, kind)(Starting, frames_per_batch=8)
    collector.next()
    collector.evaluate(1)
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("", "SyncDataCollector"),
        ("", "aSyncDataCollector"),
        ("background ", "aSyncDataCollector"),
        pytest.param("background ", "SyncDataCollector", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left(marked: Marked, how: str, kind: str) -> None:
    done = run_python("-c", SCRIPT, how + kind, timeout_s=120)
    assert done.returncode == bool(how), done.stderr
    assert done.stderr.count("Traceback") == bool(how), done.stderr
    assert ("where the frames went" in done.stderr) == (kind == "aSyncDataCollector")
    assert marked.gone(), marked.left()
