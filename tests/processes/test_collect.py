"""Frames that ``distcollect collect`` writes: after it was killed, and with a seed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.collect_command import arguments, recorded, scripted
from helpers.counted_env import STEPS
from helpers.marked import Marked
from helpers.paths import TESTS
from helpers.versions import version_of
from tensordict import TensorDict

from distcollect.commands import main as cli
from distcollect.commands.collect import command as collect

# The frames of these tests have entries such as ("arm/hand", "0").
writes_slashes = pytest.mark.skipif(
    version_of("tensordict") < (0, 13), reason="TensorDict writes no slashes before version 0.13"
)


def begun(out: Path, beyond: int, **given: Any) -> subprocess.Popen[bytes]:
    """Start a run, and wait until it has recorded more frames than ``beyond``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    process = subprocess.Popen(
        [sys.executable, "-m", "distcollect", *arguments(out, **given)],
        env=environment,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 90
    while recorded(out) <= beyond:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def check_frames(frames: TensorDict) -> None:
    """No frame is damaged or there twice, and frames of a trajectory are in order."""
    for at, shift in ((frames, 0), (frames["next"], 1)):
        episode, step = at["episode"].squeeze(-1), at["step"]
        assert (step >= shift).all()
        assert (step < STEPS + shift).all()
        assert (at["arm/hand", "0"] == step[:, None] / 2).all()
        assert (at["arm/hand", "1"][:, 0] == step % 2).all()
        assert (at["image"] == ((episode + step) % 256)[:, None, None]).all()
    assert (frames["next", "step"] == frames["step"] + 1).all()
    assert (frames["next", "reward"][:, 0] == frames["next", "step"]).all()
    assert (frames["next", "terminated"][:, 0] == (frames["next", "step"] == STEPS)).all()
    seen = set(zip(frames["episode"][:, 0].tolist(), frames["step"].tolist(), strict=True))
    assert len(seen) == len(frames)
    of_traj = frames["collector", "traj_ids"].argsort(stable=True)
    ids, steps = frames["collector", "traj_ids"][of_traj], frames["step"][of_traj]
    same = ids[1:] == ids[:-1]
    assert (steps[1:][same] == steps[:-1][same] + 1).all()
    episodes = frames["episode"][of_traj][:, 0]
    assert (episodes[1:][same] == episodes[:-1][same]).all()


@writes_slashes
def test_goes_on_where_it_was_cut_off(
    marked: Marked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "frames"
    killed = begun(out, 0, seed=5)
    killed.kill()
    killed.communicate(timeout=120)
    first = recorded(out)
    kept = TensorDict.load_memmap(out)[:first].clone()
    assert marked.gone()

    interrupted = begun(out, first, seed=5)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130
    second = recorded(out)
    assert f"interrupted with {second:,} of 4,000 frames" in said.decode()
    assert b"Traceback" not in said
    assert marked.gone()

    monkeypatch.setattr(collect, "_PRINT_EVERY_S", 0.1)
    assert cli.main(arguments(out, seed=5)) == 0
    assert recorded(out) == 4000 > second > first > 0
    # Without a terminal. 134 batches of 30 frames are the first to reach 4000.
    assert re.search(r"collect: [\d,]+ of 4,020 frames \(\d+%\), .*to go", capsys.readouterr().err)
    frames = TensorDict.load_memmap(out)
    assert (frames[:first] == kept).all()
    check_frames(frames)
    assert cli.main(arguments(out, seed=5, frames=4100)) == 0
    more = TensorDict.load_memmap(out)
    assert len(more) == recorded(out) == 4100
    assert (more[:4000] == frames).all()
    check_frames(more)
    before = (out / "collect.json").read_bytes()
    assert cli.main(arguments(out, seed=5)) == 0  # nothing is left to do
    assert f"4,100 frames are in {out} already" in capsys.readouterr().err
    assert (out / "collect.json").read_bytes() == before
    assert not marked.left()


@writes_slashes
def test_a_saved_policy_and_a_seed_give_the_same_frames_each_time(
    marked: Marked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = scripted(tmp_path / "policy.pt")
    runs = []
    for name in ("one", "two"):
        given = {
            "env": "helpers.counted_env:Counted-v0",
            "frames": 250,
            "envs_per_worker": 2,
        }
        given |= {"frames_per_batch": 40, "policy": policy, "seed": 3}
        assert cli.main(arguments(tmp_path / name, **given)) == 0
        runs.append(TensorDict.load_memmap(tmp_path / name))
    assert "250 frames are in" in capsys.readouterr().err
    check_frames(runs[0])
    assert (runs[0]["action", "turn"][:, 0] == runs[0]["step"] % 2).all()
    assert (runs[0].exclude("collector") == runs[1].exclude("collector")).all()
    assert not marked.left()


def test_a_minari_data_set(
    marked: Marked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    minari = pytest.importorskip("minari", reason="needs minari (extra minari)")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    out = tmp_path / "frames"
    given = {"env": "CartPole-v1", "frames": 300, "seed": 3}
    assert cli.main(arguments(out, **given)) == 0
    # It may be asked for later too.
    assert cli.main(arguments(out, **given, minari="cartpole/random-v0", author="me")) == 0
    said = capsys.readouterr().err
    data = minari.load_dataset("cartpole/random-v0")
    assert f"{data.total_episodes} whole episodes ({data.total_steps} frames) are in" in said
    assert f"{300 - data.total_steps} frames of unfinished ones are not" in said
    frames = TensorDict.load_memmap(out)
    ended = frames["next", "done"][:, 0]
    assert data.total_episodes == ended.sum() > 5
    # One worker with one env: the frames are in order.
    lengths = np.diff(ended.numpy().nonzero()[0], prepend=-1)
    assert [len(episode.rewards) for episode in data] == lengths.tolist()
    assert all(episode.terminations[-1] for episode in data)
    seen = [episode.observations[1:] for episode in data]
    after = frames["next", "observation"][: data.total_steps].numpy()
    assert (np.concatenate(seen) == after).all()
    assert data.storage.metadata["distcollect"]["seed"] == 3
    assert not marked.left()


@pytest.mark.parametrize("name", ["SamplingEnv", "env_of_context"])
def test_an_env_that_a_class_or_function_of_a_module_makes(tmp_path: Path, name: str) -> None:
    given = {"env": f"helpers.envs:{name}", "frames": 30}
    assert cli.main(arguments(tmp_path / "frames", **given)) == 0
    assert recorded(tmp_path / "frames") == 30
