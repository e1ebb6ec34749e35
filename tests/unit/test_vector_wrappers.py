"""Vector wrappers keep their state for the rows whose episode goes on, and may convert arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.wrappers import vector as vector_wrappers

import distcollect as dc

LENGTHS = (3, 5, 4)  # of the episodes in each row


class Row(gym.Env[np.ndarray, int]):
    """Observes (frame, 0); the second number is for wrappers."""

    observation_space = gym.spaces.Box(-1, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self._length, self._frame = length, 0

    def _seen(self) -> np.ndarray:
        return np.array([self._frame, 0], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._frame = 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self._frame += 1
        return self._seen(), 1.0, self._frame == self._length, False, {}


def rows(
    mode: AutoresetMode = AutoresetMode.NEXT_STEP, kind: type[SyncVectorEnv] = SyncVectorEnv
) -> SyncVectorEnv:
    return kind([lambda n=n: Row(n) for n in LENGTHS], autoreset_mode=mode)


class CountsAges:
    """Writes each row's frame into the second number, by its own count; knows no reset masks."""

    def reset(self, **kwargs: Any) -> Any:
        self._ages = np.zeros(len(LENGTHS))
        return super().reset(**kwargs)  # type: ignore[misc]

    def step(self, actions: Any) -> Any:
        observations, *others, infos = super().step(actions)  # type: ignore[misc]
        self._ages += 1
        for row, last in enumerate(infos.get("final_obs", ())):
            if last is not None:
                last[1] = self._ages[row]
        self._ages[observations[:, 0] == 0] = 0
        observations = observations.copy()
        observations[:, 1] = self._ages
        return observations, *others, infos


class Ages(CountsAges, VectorWrapper[Any, Any, Any, Any, Any]): ...


class AgesOfItsOwn(CountsAges, SyncVectorEnv): ...


class Calls(VectorObservationWrapper[Any, Any, Any]):
    """Counts the observations of each row since its last reset, as a frame stack would."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._ages = np.full(env.num_envs, -1)

    def observations(self, observations: Any) -> Any:
        self._ages += 1
        self._ages[observations[:, 0] == 0] = 0
        observations = observations.copy()
        observations[:, 1] = self._ages
        return observations


class Generated(Ages):
    """Does not say from which module it is."""

    def step(self, actions: Any) -> Any:
        return super().step(actions)

    step.__module__ = None  # type: ignore[assignment]


WRAPPED: dict[str, Any] = {
    "wrapper": lambda: Ages(rows()),
    "same step": lambda: Ages(rows(AutoresetMode.SAME_STEP)),
    "within another": lambda: vector_wrappers.RecordEpisodeStatistics(Ages(rows())),
    "generated": lambda: Generated(rows()),
    "observations": lambda: Calls(rows()),
    "vector env": lambda: rows(kind=AgesOfItsOwn),
}
FRAMES = 8 * len(LENGTHS)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapper_keeps_its_state_for_rows_that_go_on(kind: str) -> None:
    with dc.SyncDataCollector(WRAPPED[kind], None, frames_per_batch=FRAMES) as collector:
        for _ in range(4):
            batch = collector.next()
            for observations in (batch["observation"], batch["next", "observation"]):
                assert (observations[..., 1] == observations[..., 0]).all()
            assert batch["next", "done"].any()


@pytest.mark.parametrize("kind", [kind for kind in WRAPPED if kind != "vector env"])
def test_a_wrapper_that_may_know_no_masks_cannot_cut_rows(kind: str) -> None:
    with pytest.raises(dc.ArgumentError, match="cannot reset single rows"):
        dc.SyncDataCollector(WRAPPED[kind], None, frames_per_batch=FRAMES, max_frames_per_traj=2)


class Converts(VectorWrapper[Any, Any, Any, Any, Any]):
    """Converts the options of a reset as Gymnasium's wrappers for arrays of other kinds do."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options:
            options = type(options)(**{key: np.asarray(each) for key, each in options.items()})
        return self.env.reset(seed=seed, options=options)


@pytest.mark.parametrize("longest", [None, 2])
@pytest.mark.parametrize("converts_first", [False, True])
def test_ends_of_episodes_are_no_faults(converts_first: bool, longest: int | None) -> None:
    """A wrapper may convert the mask of a reset, another may look for it after it was popped."""
    wrappers = [Converts, vector_wrappers.RecordEpisodeStatistics]
    env: Any = rows(AutoresetMode.DISABLED)
    for wrap in wrappers if converts_first else reversed(wrappers):
        env = wrap(env)
    settings: dict[str, Any] = {"frames_per_batch": FRAMES, "max_frames_per_traj": longest}
    with dc.SyncDataCollector(lambda: env, None, **settings) as collector:
        batches = [collector.next() for _ in range(3)]
        assert not collector.stats().env_faults
    for batch in batches:
        assert not batch["collector", "faulted"].any()
        ended = batch["next", "done"][..., 0]
        assert ended.sum(-1).min() >= 1
        goes_on = ~ended[:, :-1]
        following = batch["observation"][:, 1:, 0]
        assert (following[~goes_on] == 0).all()
        assert (following == batch["observation"][:, :-1, 0] + 1)[goes_on].all()


class Scales(VectorWrapper):
    scale: Any = 1.0

    def set_scale(self, scale: float) -> str:
        self.scale = scale
        return "wrapper"


class Scaled(SyncVectorEnv):
    """Its envs have the method too."""

    class Env(Row):
        def set_scale(self, scale: float) -> str:
            return f"env {self._length}"

    def __init__(self) -> None:
        super().__init__([partial(self.Env, length) for length in LENGTHS])


def test_calls_reach_the_outermost_that_has_the_name() -> None:
    """As in wrappers of single envs."""
    with dc.SyncDataCollector(
        lambda: vector_wrappers.RecordEpisodeStatistics(Scales(Scaled())), frames_per_batch=30
    ) as collector:
        collector.next()
        assert collector.call("set_scale", 3.0) == {0: ["wrapper"]}
        assert collector.call("scale") == {0: [3.0]}
        assert collector.call("episode_count")[0][0] > 0
        assert collector.call("_length") == {0: [*LENGTHS]}
    with dc.SyncDataCollector(Scaled, frames_per_batch=30) as collector:
        assert collector.call("set_scale", 3.0) == {0: ["env 3", "env 5", "env 4"]}
