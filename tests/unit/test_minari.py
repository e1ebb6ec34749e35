"""What ``distcollect collect --minari`` writes, as Minari reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.collect_command import arguments
from helpers.counting_envs import CountingVectorEnv
from tensordict import TensorDict

import distcollect as dc
from distcollect.commands import main as cli
from distcollect.commands.collect.saved import SavedFrames
from distcollect.envs.make import make_by_id
from distcollect.integrations.minari import MinariTarget

minari = pytest.importorskip("minari", reason="needs minari (extra minari)")
pytest.importorskip("h5py", reason="needs minari (extra minari)")

NAME = "counted/random-v0"
SETTINGS = {"seed": 7, "num_workers": 2}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


class Nested(gym.Env[Any, Any]):
    """Observes how many steps its episode has had, in parts of several kinds."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "step": spaces.Discrete(99),
            "arm": spaces.Tuple((spaces.Box(0, 99, (2,), np.float64), spaces.MultiBinary(2))),
        }
    )
    action_space = spaces.Dict({"turn": spaces.MultiDiscrete([2, 3]), "go": spaces.Discrete(2)})

    def __init__(self, number: int, *, fails: bool = False) -> None:
        self.number, self.fails_at = number, 3 if fails else None

    def _observed(self) -> dict[str, Any]:
        step = self.steps
        return {
            "image": np.full((8, 8, 3), 40 * self.number + step, np.uint8),
            "step": step,
            "arm": (np.array([step, self.number], np.float64), np.array([step % 2, 1], np.int8)),
        }

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise OSError("worn out")
        over = self.steps == 4 + self.number
        truncated = over and self.number == 1
        return self._observed(), self.steps + self.number / 8, over and not truncated, truncated, {}


def saved_episodes(folder: Path) -> TensorDict:
    """Frames of envs whose episodes have 4, 5 and 6 frames; a third env fails twice before that."""
    num_made = count()
    with (
        dc.SyncDataCollector(
            lambda context: Nested(
                context.env_index, fails=context.env_index == 2 and next(num_made) < 2
            ),
            frames_per_batch=3 * 7,
            envs_per_worker=3,
            faults=dc.Faults(max_env_faults=2),
        ) as collector,
        SavedFrames(folder, 3 * 7 * 3 - 1, SETTINGS) as saved,
    ):
        while not saved.is_complete:
            saved.add(collector.next())
    return TensorDict.load_memmap(folder)


def test_episodes_are_whole_and_in_order(tmp_path: Path) -> None:
    frames = saved_episodes(tmp_path / "frames")
    env = Nested(0)
    target = MinariTarget(NAME, "random", author="A", author_email="a@b.c", code_permalink="c")
    counts = target.write(tmp_path / "frames", len(frames), env, SETTINGS)
    data = minari.load_dataset(NAME)
    assert (data.total_episodes, data.total_steps) == counts
    # Of 21 frames each. Env 2 lacks the last one, and failed twice after two frames.
    assert sorted(len(episode.rewards) for episode in data) == [*[4] * 5, *[5] * 4, *[6] * 2]
    for episode in data.iterate_episodes():
        length = len(episode.rewards)
        number = length - 4
        steps = np.arange(length + 1)
        seen = episode.observations
        assert (seen["step"] == steps).all()
        assert (seen["image"] == (40 * number + steps)[:, None, None, None]).all()
        assert (seen["arm"][0] == np.stack([steps, 0 * steps + number], 1)).all()
        assert (seen["arm"][1] == np.stack([steps % 2, 0 * steps + 1], 1)).all()
        assert (episode.rewards == steps[1:] + number / 8).all()
        ends = steps[1:] == length
        assert (episode.terminations == (ends & (number != 1))).all()
        assert (episode.truncations == (ends & (number == 1))).all()
    of_traj: dict[int, list[Any]] = {}
    for frame in frames:
        action = [*frame["action", "turn"].tolist(), frame["action", "go"].item()]
        of_traj.setdefault(int(frame["collector", "traj_ids"]), []).append(action)
    for episode in data.iterate_episodes():
        actions = episode.actions
        chosen = np.concatenate([actions["turn"], actions["go"][:, None]], 1).tolist()
        assert chosen in of_traj.values()
    metadata = data.storage.metadata
    assert metadata["distcollect"] == {"version": dc.__version__, **SETTINGS}
    assert metadata["algorithm_name"] == "random"
    assert (metadata["author"], metadata["code_permalink"]) == ({"A"}, "c")
    assert data.observation_space == env.observation_space
    assert data.action_space == env.action_space


class Counted(gym.Env[Any, Any]):
    """Observes how many steps its episode has had."""

    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == self.length, False, {}


def test_rests_of_episodes_are_left_out(tmp_path: Path) -> None:
    """Frames of rows that are ahead of others are dropped between two batches."""
    rows = [Counted(1), Counted(7)]
    with (
        dc.SyncDataCollector(
            lambda: CountingVectorEnv(rows, AutoresetMode.NEXT_STEP), frames_per_batch=20
        ) as collector,
        SavedFrames(tmp_path, 200, {}) as saved,
    ):
        while not saved.is_complete:
            saved.add(collector.next(), collector.rests)
    with SavedFrames(tmp_path, 200, {}) as again:
        assert again.rests == saved.rests != set()
    MinariTarget(NAME, "random").write(tmp_path, 200, rows[1], {}, rests=sorted(saved.rests))
    episodes = [*minari.load_dataset(NAME).iterate_episodes()]
    assert {len(episode.rewards) for episode in episodes} == {1, 7}
    assert all(episode.observations[0] == 0 for episode in episodes)


def test_an_env_with_an_id_can_be_made_from_it(tmp_path: Path) -> None:
    with (
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=100) as collector,
        SavedFrames(tmp_path, 100, {}) as saved,
    ):
        saved.add(collector.next())
    env = gym.make("CartPole-v1")
    MinariTarget(NAME, "random").write(tmp_path, 100, env, {})
    assert minari.load_dataset(NAME).recover_environment().spec.id == "CartPole-v1"


def test_an_env_of_envpool(tmp_path: Path) -> None:
    """Its spec is not one of Gymnasium's."""
    pytest.importorskip("envpool", reason="the envpool extra is not installed")
    env = make_by_id("envpool:CartPole-v1")
    with dc.SyncDataCollector(env, frames_per_batch=100) as collector:
        with SavedFrames(tmp_path, 100, {}) as saved:
            saved.add(collector.next())
        MinariTarget(NAME, "random").write(tmp_path, 100, env, {})
    assert minari.load_dataset(NAME).total_episodes > 0


def test_an_env_of_another_library_is_refused() -> None:
    """The actions of TorchRL's are one-hot, though they show Gymnasium's spaces."""
    envs = pytest.importorskip("torchrl.envs", reason="the torchrl extra is not installed")
    with pytest.raises(dc.ArgumentError, match="a GymEnv is no Gymnasium env"):
        MinariTarget(NAME, "random").check(envs.GymEnv("CartPole-v1"))


def test_without_a_whole_episode_there_is_no_data_set(tmp_path: Path) -> None:
    saved_episodes(tmp_path)
    target = MinariTarget(NAME, "random")
    with pytest.raises(dc.ArgumentError, match=r"no episode of the 3 frames .* collect more"):
        target.write(tmp_path, 3, Nested(0), {})
    assert not target.folder.exists()


def test_what_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = saved_episodes(tmp_path)
    target = MinariTarget(NAME, "random")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distcollect.integrations.minari.unflatten", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.write(tmp_path, len(frames), Nested(0), {})
    assert not target.folder.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minari": "no spaces"}, "--minari no spaces: no name of .* cartpole/random-v0"),
        ({"minari": "foo"}, "--minari foo: no name of .* NAMESPACE/NAME-vNUMBER"),
        ({"minari": NAME}, f"{NAME}: .* exists already.*minari delete {NAME}"),
        ({"minari": "x-v0", "env": "helpers.counted_env:Counted-v0"}, "'arm/hand'.*rename it"),
        ({"author": "me"}, "--author me: .*--minari NAME"),
    ],
)
def test_is_refused_before_any_process_starts(
    started: Callable[[], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    message: str,
) -> None:
    MinariTarget(NAME, "random").folder.mkdir(parents=True)
    assert cli.main(arguments(tmp_path / "out", **{"env": "CartPole-v1", **given})) == 2
    assert started() == []
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
