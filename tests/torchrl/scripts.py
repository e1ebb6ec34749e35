"""Runs TorchRL's own training scripts, with tiny budgets, with the collectors of this package.

::

    pip install hydra-core tqdm matplotlib psutil tensorboard "gymnasium[mujoco]"
    python tests/torchrl/scripts.py /tmp/rl                 # all, with ours
    python tests/torchrl/scripts.py /tmp/rl sac dqn         # those whose names contain one of these
    python tests/torchrl/scripts.py /tmp/rl --theirs        # with TorchRL's collectors

The argument is a checkout of pytorch/rl. The folder of each script is copied, and in the copy each
import of a collector from ``torchrl.collectors`` becomes one from ``distcollect``, as in
``yardstick.py``. Budgets are made small by arguments of the script, or where it has none in its
text. The result is a table in Markdown.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yardstick import our_names, plain_environment, swapped

LIMIT_S = 240


@dataclass(frozen=True)
class Script:
    """A script of TorchRL's.

    Attributes:
        path: in the checkout.
        args: its arguments.
        edits: patterns and replacements, which make its budget small where no argument does.
    """

    path: str
    args: Sequence[str] = ()
    edits: Sequence[tuple[str, str]] = ()


_OFF_POLICY = (
    "collector.total_frames=96", "collector.init_random_frames=32", "optim.batch_size=10",
    "collector.frames_per_batch=16", "replay_buffer.size=120", "logger.backend=",
)  # fmt: skip
_PENDULUM = (*_OFF_POLICY, "env.name=Pendulum-v1")
_ON_POLICY = (
    "collector.total_frames=80", "collector.frames_per_batch=40", "loss.mini_batch_size=10",
    "env.env_name=HalfCheetah-v5", "logger.backend=", "logger.test_interval=100000",
)  # fmt: skip
_SMALL = (
    (r"^(\s*)total_frames = [\d_]+.*$", r"\1total_frames = 800"),
    (r"^(\s*)frames_per_batch = [\d_]+.*$", r"\1frames_per_batch = 100"),
    (r"^(\s*)init_random_frames = [\d_]+.*$", r"\1init_random_frames = 100"),
    (r"^(\s*)(sub_batch_size|batch_size) = [\d_]+.*$", r"\1\2 = 16"),
    (r"^(\s*)num_epochs = [\d_]+.*$", r"\1num_epochs = 2"),
    (r"total_frames=[\d_]+", "total_frames=800"),
)

SCRIPTS = {
    "sac": Script("sota-implementations/sac/sac.py", _PENDULUM),
    "td3": Script("sota-implementations/td3/td3.py", _PENDULUM),
    "ddpg": Script("sota-implementations/ddpg/ddpg.py", _PENDULUM),
    "tqc": Script("sota-implementations/tqc/tqc.py", _PENDULUM),
    "crossq": Script("sota-implementations/crossq/crossq.py", _PENDULUM),
    "discrete_sac": Script(
        "sota-implementations/discrete_sac/discrete_sac.py",
        (*_OFF_POLICY, "env.library=gymnasium"),
    ),
    "redq": Script(
        "sota-implementations/redq/redq.py",
        ("num_workers=1", "collector.total_frames=96", "collector.init_random_frames=32",
         "collector.frames_per_batch=16", "collector.env_per_collector=2", "buffer.batch_size=10",
         "optim.steps_per_batch=1", "buffer.size=120", "env.name=Pendulum-v1", "logger.backend="),
    ),
    "dqn_cartpole": Script(
        "sota-implementations/dqn/dqn_cartpole.py",
        ("collector.total_frames=400", "collector.init_random_frames=100",
         "collector.frames_per_batch=50", "buffer.batch_size=10", "loss.num_updates=2",
         "buffer.buffer_size=200", "logger.backend="),
    ),
    "ppo_mujoco": Script(
        "sota-implementations/ppo/ppo_mujoco.py", (*_ON_POLICY, "loss.ppo_epochs=2")
    ),
    "a2c_mujoco": Script("sota-implementations/a2c/a2c_mujoco.py", _ON_POLICY),
    "rnd_mujoco": Script(
        "sota-implementations/rnd/rnd_mujoco.py", (*_ON_POLICY, "loss.ppo_epochs=2")
    ),
    "discrete_cql_online": Script(
        "sota-implementations/cql/discrete_cql_online.py",
        (*_OFF_POLICY, "collector.env_per_collector=2"),
    ),
    "iql_online": Script(
        "sota-implementations/iql/iql_online.py",
        ("collector.total_frames=96", "optim.batch_size=10", "collector.frames_per_batch=16",
         "env.train_num_envs=2", "env.name=Pendulum-v1", "logger.backend="),
    ),
    "discrete_iql": Script(
        "sota-implementations/iql/discrete_iql.py",
        ("collector.total_frames=96", "optim.batch_size=10", "collector.frames_per_batch=16",
         "env.train_num_envs=2", "logger.backend="),
    ),
    "tutorial coding_ppo": Script(
        "tutorials/sphinx-tutorials/coding_ppo.py",
        edits=(*_SMALL, (r"InvertedDoublePendulum-v\d", "InvertedDoublePendulum-v5")),
    ),
    "tutorial coding_ddpg": Script("tutorials/sphinx-tutorials/coding_ddpg.py", edits=_SMALL),
    "tutorial coding_dqn": Script("tutorials/sphinx-tutorials/coding_dqn.py", edits=_SMALL),
    "tutorial dqn_with_rnn": Script("tutorials/sphinx-tutorials/dqn_with_rnn.py", edits=_SMALL),
    "tutorial getting-started-3": Script("tutorials/sphinx-tutorials/getting-started-3.py"),
    "tutorial getting-started-5": Script(
        "tutorials/sphinx-tutorials/getting-started-5.py",
        edits=(*_SMALL, (r"(stop_after|init_rand_steps|optim_steps)( *)= *[\d_]+", r"\1 = 5")),
    ),
    "tutorial collector_trajectory_assembly": Script(
        "tutorials/sphinx-tutorials/collector_trajectory_assembly.py"
    ),
    "tutorial memory_efficient_rl": Script(
        "tutorials/sphinx-tutorials/memory_efficient_rl.py", edits=_SMALL
    ),
    "example multi_weight_updates": Script("examples/collectors/multi_weight_updates.py"),
    "example weight_sync_collectors": Script("examples/collectors/weight_sync_collectors.py"),
}  # fmt: skip


def run(script: Script, checkout: Path, ours: frozenset[str]) -> tuple[bool, float, str]:
    """Run a script; returns whether it succeeded, its seconds, and its last line."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        folder = Path(name) / "copy"
        source = checkout / script.path
        shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns("media", "*.gif"))
        for path in folder.glob("*.py"):
            path.write_text(swapped(path.read_text(), ours))
        main = folder / source.name
        text = main.read_text()
        for pattern, replacement in script.edits:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        main.write_text(text)
        begin = time.monotonic()
        try:
            result = subprocess.run(
                [sys.executable, main.name, *script.args],
                cwd=folder,
                env=plain_environment(MPLBACKEND="Agg", WANDB_MODE="disabled"),
                check=False,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return False, float(LIMIT_S), f"not done after {LIMIT_S} s"
        output = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        errors = [line for line in output if re.match(r"[\w.]*(Error|Exception)\b", line)]
        last = (errors or output or [""])[-1]
        return result.returncode == 0, time.monotonic() - begin, last


def main() -> None:
    """Run the scripts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("name", nargs="*", help="only scripts whose names contain one of these")
    parser.add_argument("--theirs", action="store_true", help="with TorchRL's own collectors")
    given = parser.parse_args()
    ours = frozenset() if given.theirs else our_names()
    print("| script | runs | seconds | |\n|---|---|---|---|", flush=True)
    for name, script in SCRIPTS.items():
        if given.name and not any(part in name for part in given.name):
            continue
        succeeded, seconds, last = run(script, given.checkout, ours)
        note = "" if succeeded else last[:200].replace("|", "/")
        runs = "yes" if succeeded else "no"
        print(f"| `{script.path}` | {runs} | {seconds:.0f} | {note} |", flush=True)


if __name__ == "__main__":
    main()
