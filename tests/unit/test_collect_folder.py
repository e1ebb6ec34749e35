"""What ``distcollect collect`` refuses, writes and reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.collect_command import arguments, recorded, scripted
from helpers.versions import version_of
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.commands import main as cli
from distcollect.commands.collect.policy_file import named_policy
from distcollect.commands.collect.saved import SavedFrames, frame_bytes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "CartPoel-v1"}, "CartPoel.*CartPole"),
        ({"frames": 0}, "--frames=0: must be at least 1"),
        ({"num_workers": -1}, "--num-workers=-1: must be at least 1"),
        ({"envs_per_worker": 0}, "--envs-per-worker=0: must be at least 1"),
        ({"frames": 10**15}, "1,000,000,000,000,000 frames need .* GiB, and .* left: take fewer"),
        ({"policy": "nowhere.pt"}, "nowhere.pt: there is no such file.*MODULE:NAME"),
        ({"policy": "nowhere:policy"}, "'nowhere' can't be imported"),
        ({"policy": "sys:policy"}, r"'sys' \(built in\) has no 'policy'"),
        ({"policy": ":policy"}, ":policy: there is no such file.*MODULE:NAME"),
        ({"policy": ".nowhere:policy"}, "importing the module '.nowhere' raised TypeError"),
        ({"weights": "w.pt"}, "--weights w.pt needs a --policy"),
    ],
)
def test_is_refused_before_any_process_starts(
    started: Callable[[], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    message: str,
) -> None:
    assert cli.main(arguments(tmp_path / "out", **{"env": "CartPole-v1", **given})) == 2
    assert started() == []
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.rglob("*.memmap"))


def test_a_folder_with_other_content_or_settings_is_refused(
    started: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    given: dict[str, Any] = {"env": "CartPole-v1", "frames": 20}
    assert cli.main(arguments(tmp_path, **given)) == 2
    assert "holds other things (thesis.tex): name a new" in capsys.readouterr().err

    settings = {"env": "CartPole-v1", "deterministic": False, "num_workers": 1}
    settings |= {"envs_per_worker": 1, "frames_per_batch": 30, "seed": None, "policy": "random"}
    with SavedFrames(tmp_path / "out", 20, settings) as saved:
        saved.begin()
        assert cli.main(arguments(tmp_path / "out", **given)) == 2
        assert "another process is writing there" in capsys.readouterr().err
        with dc.SyncDataCollector("CartPole-v1", frames_per_batch=5) as collector:
            saved.add(collector.next())
    assert cli.main(arguments(tmp_path / "out", **{**given, "seed": 4, "frames": 30})) == 2
    assert "frames 20, not 30; seed None, not 4" in capsys.readouterr().err
    (tmp_path / "out" / "collect.json").write_text("{}")
    assert cli.main(arguments(tmp_path / "out", **given)) == 2
    assert "is no record of format 1" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(arguments(tmp_path / "file" / "out", **given)) == 2
    assert "can't be a folder of frames (Not a directory): name another" in capsys.readouterr().err
    assert started() == []


SPACES = {
    "box": spaces.Box(-1, 1, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        {"a/b": spaces.Dict({"meta.json": spaces.Discrete(2)}), "..": spaces.Box(0, 1)}
    ),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Tuple((spaces.Box(0, 1, (0,)),)))),
}


class Sampled(gym.Env[Any, Any]):
    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space = self.action_space = space
        if isinstance(space, spaces.Tuple) or not space.shape:
            self.action_space = spaces.Tuple((space, spaces.Discrete(2)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.5, bool(self.np_random.random() < 0.2), False, {}


def test_a_tensordict_that_writes_no_slashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensordict.__version__", "0.12.4")
    with dc.SyncDataCollector(lambda: Sampled(SPACES["dict"]), frames_per_batch=12) as collector:
        batch = collector.next()
    with SavedFrames(tmp_path, 12, {}) as saved:
        saved.begin()
        with pytest.raises(
            dc.ArgumentError, match=r"0\.12\.4 can't write .* a/b.* install .* 0\.13"
        ):
            saved.add(batch)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_what_is_written_is_what_is_read(space: gym.Space[Any], tmp_path: Path) -> None:
    if space == SPACES["dict"] and version_of("tensordict") < (0, 13):
        pytest.skip("TensorDict writes no slashes before version 0.13")
    with dc.SyncDataCollector(
        lambda: Sampled(space), frames_per_batch=12, envs_per_worker=2
    ) as collector:
        batches = [collector.next() for _ in range(3)]
    with SavedFrames(tmp_path, 30, {}) as saved:
        saved.begin()
        assert [saved.add(batch) for batch in batches] == [12, 12, 6]
        assert saved.is_complete
    whole = torch.cat([batch.reshape(-1) for batch in batches])[:30]
    read = TensorDict.load_memmap(tmp_path)
    names = {True: set(), False: set()}
    for key, value in whole.items(include_nested=True, leaves_only=True):
        names[value.numel() > 0].add(key)
        if value.numel():
            assert torch.equal(read[key], value)
            assert read[key].dtype is value.dtype
    assert set(read.keys(include_nested=True, leaves_only=True)) >= names[True]
    assert frame_bytes(Sampled(space)) == whole[:1].bytes()


def test_without_frames_other_settings_will_do(tmp_path: Path) -> None:
    """What was made for frames of the other settings is gone, and what is not ours stays."""
    with SavedFrames(tmp_path, 12, {"seed": -3}) as saved:
        saved.begin()
        with dc.SyncDataCollector(
            lambda: Sampled(spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2)))), frames_per_batch=12
        ) as collector:
            saved._mapped(collector.next().reshape(-1))  # the process ends before it has recorded
    notes = tmp_path / "notes" / "text"
    notes.parent.mkdir()
    notes.touch()
    with SavedFrames(tmp_path, 12, {"seed": 3}) as saved:
        assert {path.name for path in tmp_path.iterdir()} == {"collect.json", "notes"}
        saved.begin()
        with dc.SyncDataCollector("CartPole-v1", frames_per_batch=12) as collector:
            saved.add(collector.next())
    assert recorded(tmp_path) == 12
    assert TensorDict.load_memmap(tmp_path)["observation"].shape == (12, 4)
    assert notes.exists()
    with pytest.raises(dc.ArgumentError, match="seed 3, not 4"):
        SavedFrames(tmp_path, 12, {"seed": 4})


def test_room_that_was_taken_in_vain_is_given_back(tmp_path: Path) -> None:
    with SavedFrames(tmp_path, 30, {}) as saved:
        saved.begin()
    left = tmp_path / "next" / "observation.memmap"
    left.parent.mkdir()
    left.write_bytes(b"x" * 100)
    with SavedFrames(tmp_path, 30, {}):
        assert not left.exists()


def test_who_was_killed_as_it_began_has_left_nothing_that_counts(tmp_path: Path) -> None:
    (tmp_path / ".collect.json").write_text('{"form')
    with SavedFrames(tmp_path, 30, {}) as saved:
        saved.begin()
    assert recorded(tmp_path) == 0
    assert not (tmp_path / ".collect.json").exists()


def test_a_disk_that_is_full_is_told_of_in_words(tmp_path: Path) -> None:
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=5) as collector:
        batch = collector.next()
    saved = SavedFrames(tmp_path, 10, {})
    saved.begin()
    saved.add(batch)
    (tmp_path / ".collect.json").symlink_to("/dev/full")
    with pytest.raises(dc.ArgumentError, match=r"No space left.*continues from"):
        saved.close()
    # All is given back: another process may go on.
    (tmp_path / ".collect.json").unlink(missing_ok=True)
    with SavedFrames(tmp_path, 10, {}) as saved:
        assert saved.frames == 0


def test_frames_of_another_kind_are_not_mixed_in(tmp_path: Path) -> None:
    def batch(action: gym.Space[Any]) -> TensorDict:
        env = Sampled(spaces.Discrete(3))
        env.action_space = action
        with dc.SyncDataCollector(env, frames_per_batch=5) as collector:
            return collector.next()

    with SavedFrames(tmp_path, 10, {}) as saved:
        saved.begin()
        saved.add(batch(spaces.Discrete(2)))
    other = batch(spaces.MultiDiscrete([2, 2]))
    with SavedFrames(tmp_path, 10, {}) as saved:
        saved.begin()
        with pytest.raises(dc.ArgumentError, match="in action; name another folder"):
            saved.add(other)


marks: list[str] = []


def leave_mark() -> None:
    marks.append("loaded")


class Touch:
    """Unpickling it creates a file."""

    def __reduce__(self) -> Any:
        return leave_mark, ()


def _newer(archive: bytes) -> bytes:
    """A zip file of an unknown future version."""
    entry = archive.index(b"PK\x01\x02")
    return archive[: entry + 6] + b"\xff" + archive[entry + 7 :]


def test_policies_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, tmp_path / "weights.pt")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Linear(2, 1)\n"
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 1)\n"
        "net = Net()\n"
        "class Sized(nn.Linear):\n    pass\n"
        "def act(observation):\n    return observation\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in ("make", "Net", "net"):
        found = named_policy(f"net:{name}", Path("weights.pt"), trust=False)
        assert isinstance(found.policy, nn.Linear)
        assert found.policy.weight.tolist() == [[1.0, 1.0]]
        assert found.identity.startswith(f"net:{name} sha256:")
    assert named_policy("net:act", trust=False).policy(5) == 5
    assert named_policy(None, trust=False) == (None, None, "random")
    with pytest.raises(dc.ArgumentError, match=r"net:act is no torch module"):
        named_policy("net:act", Path("weights.pt"), trust=False)
    with pytest.raises(dc.ArgumentError, match=r"weights.pt holds a dict.*--weights weights.pt"):
        named_policy("weights.pt", trust=False)

    with pytest.raises(dc.ArgumentError, match=r"net:Sized: Sized\(\) raised TypeError"):
        named_policy("net:Sized", trust=False)

    torch.save(nn.Linear(3, 1), "module.pt")
    with pytest.raises(dc.ArgumentError, match=r"module.pt is a pickle.*--trust-policy"):
        named_policy("module.pt", trust=False)
    assert isinstance(named_policy("module.pt", trust=True).policy, nn.Linear)
    torch.save(Touch(), "bad.pt")
    with pytest.raises(dc.ArgumentError, match=r"bad.pt is a pickle"):
        named_policy("bad.pt", trust=False)
    assert marks == []
    with pytest.raises(dc.ArgumentError, match=r"holds a NoneType, which is no policy"):
        named_policy("bad.pt", trust=True)
    assert marks == ["loaded"]
    module = Path("module.pt").read_bytes()
    for noise in (b"noise", b"", b"i\xe9\n\xe9\n", b"0", module[:200]):
        Path("noise.pt").write_bytes(noise)
        for trust in (False, True):
            with pytest.raises(dc.ArgumentError, match=r"noise.pt was not written by torch.save"):
                named_policy("noise.pt", trust=trust)
        with pytest.raises(dc.ArgumentError, match=r"noise.pt is no file of weights"):
            named_policy("net:Net", Path("noise.pt"), trust=False)
    Path("newer.pt").write_bytes(_newer(module))
    with pytest.raises(dc.ArgumentError, match=r"newer.pt is a pickle"):
        named_policy("newer.pt", trust=False)

    found = named_policy(str(scripted(tmp_path / "turns.pt")), trust=False)
    assert found.factory is not None
    step = torch.tensor([6])
    assert found.factory()(step, episode=torch.tensor([[1]]))["go"].tolist() == [1]
