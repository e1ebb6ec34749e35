"""An env whose step returns what no Gymnasium env may return is found out at its first step."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers.envs import SamplingEnv

import distcollect as dc

SEEN = np.zeros(3, np.float32)
OF_OLD_GYM = (SEEN, 0.0, False, {})
WRONG = [
    (OF_OLD_GYM, r"4 values \(ndarray, float, bool, dict\), not the 5 .*terminated.*old gym"),
    (SEEN, r"ndarray, not the 5 \(observation, reward, terminated, truncated, info\) \(step 1\)"),
    ((SEEN, 0.0, False, False, None), "None as the info, which must be a dict"),
    ((SEEN, None, False, False, {}), "None as the reward, which must be one number"),
    ((SEEN, 0.0, None, False, {}), "None as 'terminated', which must be True or False"),
    ((np.zeros(4, np.float32), 0.0, False, False, {}), r"shape \[4\].*space says \[3\]"),
    ((np.array([*"abc"]), 0.0, False, False, {}), "dtype <U1.*space says .*float32"),
]


class Wrong(SamplingEnv):
    """Its steps return ``result``, from the step ``since`` on."""

    def __init__(self, result: Any, since: int = 1) -> None:
        super().__init__()
        self.result, self.since = result, since

    def step(self, action: Any) -> Any:
        right = super().step(action)
        return self.result if self.steps >= self.since else right


class WrongVector(gym.vector.VectorEnv[Any, Any, Any]):
    num_envs = 2
    single_observation_space = spaces.Box(-1, 1, (3,), np.float32)
    single_action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1, 1, (2, 3), np.float32)
    action_space = spaces.MultiDiscrete([2, 2])

    def reset(self, **_: Any) -> Any:
        return np.zeros((2, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        return np.zeros((2, 3), np.float32), np.zeros(2), np.zeros(2, bool), {}


def envs_made_until(error: str, make: Any, num_envs: int = 1) -> int:
    """Collect until an EnvError of this text; how many envs were made."""
    made = []

    def maker() -> Any:
        made.append(make())
        return made[-1]

    with (
        dc.SyncDataCollector(maker, frames_per_batch=8, envs_per_worker=num_envs) as collector,
        pytest.raises(dc.EnvError, match=error),
    ):
        collector.next()
    return len(made)


@pytest.mark.parametrize(("result", "told"), WRONG)
def test_no_new_env_is_made(result: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="distcollect"):
        num_made = envs_made_until(
            rf"^env 0 \(Wrong\): step\(\) returned .*{told}", lambda: Wrong(result)
        )
    assert num_made == 1
    assert not caplog.records


def test_no_new_vector_env_is_made() -> None:
    assert envs_made_until(r"step\(\) returned 4 values .*old gym", WrongVector, 2) == 1


@pytest.mark.parametrize(("result", "told"), WRONG[3:])
def test_a_later_step_may_be_bad_luck(result: Any, told: str) -> None:
    told = rf"{told}.*replaced 3 times in a row"
    assert envs_made_until(told, lambda: Wrong(result, since=2)) == 4


def test_infos_of_resets_are_dicts_too() -> None:
    class NoInfo(SamplingEnv):
        def reset(self, **_: Any) -> Any:
            return SEEN, None

    with pytest.raises(dc.EnvError, match=r"reset\(\) returned None as the info"):
        dc.SyncDataCollector(NoInfo, frames_per_batch=8)
