"""A trainer whose memory its workers may not map, though it may map theirs."""

from __future__ import annotations

from pathlib import Path

from helpers.programs import run_python

SCRIPT = """
import ctypes, os, sys
from torch import nn
import distcollect as dc

libc = ctypes.CDLL(None)
if sys.argv[1:] == []:
    libc.prctl(24, 19, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_PTRACE: root may map all with it
    os.execv(sys.executable, [sys.executable, __file__, "without it"])
libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
net = nn.Linear(4, 2)
act = lambda observation: net(observation).argmax(-1)
given = {"num_workers": 2, "models": {"net": net}}
with dc.MultiSyncDataCollector("CartPole-v1", act, frames_per_batch=16, **given) as collector:
    for version in (1, 2):
        push = collector.update_policy_weights_({"net": net})
        push.wait()
        versions = collector.next(timeout_s=60)["collector", "policy_version"]
        assert versions.unique().tolist() == [version], versions
print("both versions came")
"""


def test_weights_reach_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_python(script, timeout_s=150)
    assert done.stdout == "both versions came\n", done.stderr
