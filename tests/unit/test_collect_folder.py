"""What ``distcollect collect`` refuses, writes and reads."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
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
from distcollect.commands.collect.saved import SavedFrames
from distcollect.commands.named import named_policy


def refused(out: Path, capsys: pytest.CaptureFixture[str], **given: Any) -> str:
    """The message of a command that is refused."""
    assert cli.main(arguments(out, **{"env": "CartPole-v1", "frames": 20, **given})) == 2
    return capsys.readouterr().err


def cartpole(num_frames: int = 5) -> TensorDict:
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=num_frames) as collector:
        return collector.next()


def test_a_folder_with_other_content_or_settings_is_refused(
    started: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert "holds other things (thesis.tex): name a new" in refused(tmp_path, capsys)
    out = tmp_path / "out"
    settings = {"env": "CartPole-v1", "deterministic": False, "num_workers": 1}
    settings |= {"envs_per_worker": 1, "frames_per_batch": 30, "seed": None, "policy": "random"}
    with SavedFrames(out, 20, settings) as saved:
        assert "another process is writing there" in refused(out, capsys)
        saved.add(cartpole())
    assert "other settings: seed (none given), not 4" in refused(out, capsys, seed=4, frames=30)
    (out / "collect.json").write_text("{}")
    assert "is no record of format 1" in refused(out, capsys)
    message = "can't be a folder of frames (Not a directory): name another"
    assert message in refused(tmp_path / "thesis.tex" / "out", capsys)
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


def sampled(space: gym.Space[Any], num_frames: int = 12, num_envs: int = 1) -> list[TensorDict]:
    options = {"frames_per_batch": num_frames, "envs_per_worker": num_envs}
    with dc.SyncDataCollector(lambda: Sampled(space), **options) as collector:
        return [collector.next() for _ in range(3)]


def test_a_tensordict_that_writes_no_slashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensordict.__version__", "0.12.4")
    message = r"0\.12\.4 can't write .* a/b.* install .* 0\.13"
    with SavedFrames(tmp_path, 12, {}) as saved, pytest.raises(dc.ArgumentError, match=message):
        saved.add(sampled(SPACES["dict"])[0])


def cut_off(monkeypatch: pytest.MonkeyPatch, folder: Path, batch: TensorDict) -> None:
    """End a process in the middle of making the files longer."""
    replace, replaced = Path.replace, itertools.count()

    def replace_one(path: Path, target: Path) -> Path:
        if next(replaced):
            raise KeyboardInterrupt
        return replace(path, target)

    with SavedFrames(folder, 20, {}) as saved, monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_one)
        with pytest.raises(KeyboardInterrupt):
            saved.add(batch)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_what_is_written_is_what_is_read(
    space: gym.Space[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if space == SPACES["dict"] and version_of("tensordict") < (0, 13):
        pytest.skip("TensorDict writes no slashes before version 0.13")
    batches = sampled(space, num_envs=2)
    with SavedFrames(tmp_path, 12, {}) as saved:
        assert saved.add(batches[0]) == 12
        assert saved.is_complete
    cut_off(monkeypatch, tmp_path, batches[1])
    with SavedFrames(tmp_path, 30, {}) as saved:
        assert (saved.frames, saved.is_complete) == (12, False)
        assert [saved.add(batch) for batch in batches[1:]] == [12, 6]
        assert saved.is_complete
    with SavedFrames(tmp_path, 7, {}) as saved:
        assert (saved.frames, saved.is_complete) == (30, True)
    whole = torch.cat([batch.reshape(-1) for batch in batches])[:30]
    read = TensorDict.load_memmap(tmp_path)
    for key, value in whole.items(include_nested=True, leaves_only=True):
        if value.numel():
            assert torch.equal(read[key], value)
            assert read[key].dtype is value.dtype


def test_a_disk_with_too_little_room(tmp_path: Path) -> None:
    message = "1,000,000,000,000,000 frames need .* GiB, and .* left: take fewer"
    with SavedFrames(tmp_path, 10**15, {}) as saved, pytest.raises(dc.ArgumentError, match=message):
        saved.add(cartpole())
    assert not list(tmp_path.rglob("*.memmap"))


def test_without_frames_other_settings_will_do(tmp_path: Path) -> None:
    """What was made for frames of the other settings is gone, and what is not ours stays."""
    (tmp_path / ".collect.json").write_text('{"form')  # of a process that was killed as it began
    with SavedFrames(tmp_path, 12, {"seed": -3}):
        pass
    assert recorded(tmp_path) == 0
    for name in ("a/b.memmap", "a/meta.json", "notes/text"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 100)
    with SavedFrames(tmp_path, 12, {"seed": 3}) as saved:
        assert {path.name for path in tmp_path.iterdir()} == {"collect.json", "notes"}
        saved.add(cartpole(12))
    assert recorded(tmp_path) == 12
    assert TensorDict.load_memmap(tmp_path)["observation"].shape == (12, 4)
    assert (tmp_path / "notes" / "text").exists()
    with pytest.raises(dc.ArgumentError, match="seed 3, not 4"):
        SavedFrames(tmp_path, 12, {"seed": 4})


def test_a_disk_that_is_full_is_told_of_in_words(tmp_path: Path) -> None:
    saved = SavedFrames(tmp_path, 10, {})
    saved.add(cartpole())
    (tmp_path / ".collect.json").symlink_to("/dev/full")
    with pytest.raises(dc.ArgumentError, match=r"No space left.*continues from"):
        saved.close()
    # All is given back: another process may go on.
    (tmp_path / ".collect.json").unlink(missing_ok=True)
    with SavedFrames(tmp_path, 10, {}) as saved:
        assert saved.frames == 0


def test_frames_of_another_kind_are_not_mixed_in(tmp_path: Path) -> None:
    with SavedFrames(tmp_path, 30, {}) as saved:
        saved.add(sampled(spaces.MultiBinary(4))[0])
    message = "in action, next.observation, observation; name another folder"
    with SavedFrames(tmp_path, 30, {}) as saved, pytest.raises(dc.ArgumentError, match=message):
        saved.add(sampled(spaces.MultiBinary(3))[0])


marks: list[str] = []


def leave_mark() -> None:
    marks.append("loaded")


class Touch:
    """Unpickling it creates a file."""

    def __reduce__(self) -> Any:
        return leave_mark, ()


def test_a_function_has_its_modules_weights_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.py").write_text(
        "from torch import nn\n"
        "own = nn.Linear(2, 1)\n"
        "def act(observation):\n    return own(observation)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = named_policy("held:act", trust=False)
    expected = sys.modules["held"].own(torch.ones(1, 2))
    pickled = cloudpickle.dumps(found.factory)
    del sys.modules["held"]  # a worker imports it, and so makes another module
    assert torch.equal(pickle.loads(pickled)()(torch.ones(1, 2)), expected)


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
    monkeypatch.syspath_prepend(tmp_path)

    def policy(name: str, weights: str | None = None, *, trust: bool = False) -> Any:
        return named_policy(name, weights and Path(weights), trust=trust).factory()

    def is_refused(message: str, *given: Any, trust: bool = False) -> None:
        with pytest.raises(dc.ArgumentError, match=message):
            policy(*given, trust=trust)

    for name in ("make", "Net", "net"):
        assert policy(f"net:{name}", "weights.pt").weight.tolist() == [[1.0, 1.0]]
        identity = named_policy(f"net:{name}", Path("weights.pt"), trust=False).identity
        assert identity.startswith(f"net:{name} sha256:")
    assert policy("net:act")(5) == 5
    assert named_policy(None, trust=False) == (None, "random")
    is_refused(r"net:act is no torch module", "net:act", "weights.pt")
    is_refused(r"weights.pt is a pickle.*MODULE:NAME --weights weights.pt", "weights.pt")
    is_refused(r"net:Sized: Sized\(\) raised TypeError", "net:Sized")

    is_refused(r"if these are weights: --policy MODULE:NAME --weights w", "weights.pt", trust=True)
    gone = type("Gone", (nn.Linear,), {"__module__": "__main__"})
    sys.modules["__main__"].Gone = gone  # type: ignore[attr-defined]
    torch.save(gone(1, 1), "gone.pt")
    del sys.modules["__main__"].Gone  # type: ignore[attr-defined]
    is_refused(r"if that is '__main__', move its class .* to a module", "gone.pt", trust=True)

    torch.save(nn.Linear(3, 1), "module.pt")
    is_refused(r"module.pt is a pickle.*--trust-policy", "module.pt")
    is_refused(r"--weights weights.pt: the policy in module.pt has", "module.pt", "weights.pt")
    assert isinstance(policy("module.pt", trust=True), nn.Linear)
    torch.save(Touch(), "bad.pt")
    is_refused(r"bad.pt is a pickle", "bad.pt")
    assert marks == []
    is_refused(r"bad.pt: None can't be called, so it is no policy", "bad.pt", trust=True)
    assert marks == ["loaded"]
    for noise in (b"noise", b"", b"i\xe9\n\xe9\n", b"0", Path("module.pt").read_bytes()[:200]):
        Path("noise.pt").write_bytes(noise)
        for trust in (False, True):
            is_refused(r"noise.pt was not written by torch.save", "noise.pt", trust=trust)
        is_refused(r"noise.pt is no file of weights", "net:Net", "noise.pt")

    found = policy(str(scripted(tmp_path / "turns.pt")))
    assert found(torch.tensor([6]), episode=torch.tensor([[1]]))["go"].tolist() == [1]
