"""What envs return is stored as it is, or refused: no number is changed on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TransformObservation
from helpers.counting_envs import CountingEnv, CountingVectorEnv
from helpers.env_contract import batch_of, sample

import distcollect as dc
from distcollect.envs.base import EnvBatch
from distcollect.errors import EnvError


def boxed(value: Any) -> Any:
    """What numpy makes of it, in an array ``[4, 3, 2]`` of that value."""
    return np.full((4, 3, 2), value)


class Told(CountingEnv):
    """Its fourth step returns ``told`` instead of the entry number ``index`` of the result."""

    def __init__(self, index: int, told: Any, observation: str = "box32") -> None:
        super().__init__(observation=observation, lengths=(100,))
        self.index, self.told = index, told

    def step(self, action: Any) -> Any:
        result = list(super().step(action))
        if self.num_steps == 4:
            result[self.index] = self.told
        return tuple(result)


CHANGED_ON_THE_WAY = [
    ("image", boxed(300), r"'observation' with the value 300, which uint8 can't hold"),
    ("image", boxed(-1), r"the value -1, which uint8 can't hold"),
    ("image", boxed(np.uint16(256)), r"the value 256, which uint8 can't hold"),
    ("image", boxed(0.5), r"dtype float64, .* says \[4, 3, 2\] and uint8"),
    ("image", np.zeros((4, 3, 1), np.uint8), r"shape \[4, 3, 1\]"),
    ("image", np.uint8(3), r"shape \[\] "),
    ("image", "pixels", r"dtype <U6"),
    ("discrete", 2.5, r"dtype float64, .* and int64"),
    ("discrete", 2**63, r"the value 9223372036854775808, which int64 can't hold"),
    ("discrete", np.array([1]), r"shape \[1\]"),
    ("discrete", None, r"dtype object"),
    ("multibinary", np.full(24, 200), r"the value 200, which int8 can't hold"),
    ("box32", np.array([0, 1e300, 0, 0]), r"the value 1e\+300, which float32 can't hold"),
    ("box32", np.array([0, 1, 2, 3j]), r"dtype complex128"),
    ("box32", [[0, 1], [2]], "no array"),
]


def check_fourth_step(batch: EnvBatch, match: str) -> None:
    """Three steps work; the fourth raises an error that says what env 1 returned."""
    batch.reset()
    for _ in range(3):
        batch.step(sample(batch))
    with pytest.raises(EnvError, match=rf"env 1 \(Told\): step\(\) returned {match}.* \(step 4\)"):
        batch.step(sample(batch))


@pytest.mark.parametrize(("observation", "told", "match"), CHANGED_ON_THE_WAY)
def test_later_observation_that_numpy_would_change(observation: str, told: Any, match: str) -> None:
    envs = [CountingEnv(observation=observation, lengths=(100,)), Told(0, told, observation)]
    with batch_of(envs, 2) as batch:
        check_fourth_step(batch, f".*{match}")


NO_REWARD = [
    (1, None, "None as the reward, which must be one number"),
    (1, "1", r"'1' of type str as the reward"),
    (1, np.zeros(2), r"an array of shape \[2\] as the reward"),
    (1, 1j, "1j of type complex as the reward"),
    (2, None, "None as 'terminated', which must be True or False"),
    (2, "False", "'False' of type str as 'terminated'"),
    (3, 0.5, "0.5 of type float as 'truncated'"),
    (3, np.array([True, False]), r"an array of shape \[2\] as 'truncated'"),
]


@pytest.mark.parametrize(("index", "told", "match"), NO_REWARD)
def test_reward_or_flag_that_is_none(index: int, told: Any, match: str) -> None:
    with batch_of([CountingEnv(lengths=(100,)), Told(index, told)], 2) as batch:
        check_fourth_step(batch, match)


SAME_NUMBERS = [
    (np.float32(2.5), False),
    (np.float64(2.5), np.bool_(False)),
    (np.array(2.5), np.array(0)),
    (np.array([2.5]), np.array([False])),
    (torch.tensor([2.5]), 0),
]


@pytest.mark.parametrize(("reward", "flag"), SAME_NUMBERS)
def test_one_number_in_any_form(reward: Any, flag: Any) -> None:
    env = Told(1, reward)
    with batch_of(env, 1) as batch:
        batch.reset()
        for _ in range(3):
            batch.step(sample(batch))
        env.told, result = reward, batch.step(sample(batch))
        assert result.reward.tolist() == [2.5]
        assert result.ended == []
        for index in (2, 3):
            env.index, env.told, env.num_steps = index, flag, 3
            assert batch.step(sample(batch)).ended == []
        for index, over in ((2, np.array([True])), (3, 1), (3, np.True_)):
            env.index, env.told, env.num_steps = index, over, 3
            result = batch.step(sample(batch))
            assert (result.terminated.tolist(), result.truncated.tolist()) == (
                ([True], [False]) if index == 2 else ([False], [True])
            )


@pytest.mark.parametrize("convert", [np.float64, np.float16, list, np.int16])
def test_observation_of_another_dtype_with_the_same_numbers(convert: Any) -> None:
    env = CountingEnv(lengths=(100,))
    change = convert if convert is list else lambda value: value.astype(convert)
    with batch_of(TransformObservation(env, change, env.observation_space), 1) as batch:
        batch.reset()
        for _ in range(20):
            assert batch.obs["observation",].tolist() == [list(env.facts)]
            batch.step(sample(batch))


NOT_FINITE = [
    (1, 1e300, "box32", "the reward, as float32, is inf: .* scale it"),
    (1, float("nan"), "discrete", "the reward, as float32, is nan: "),
    (0, np.array([0, 1, np.nan, 2], np.float32), "box32", "'observation' has nan in it: find"),
    (0, [0, 1, -float("inf"), 2], "box32", "'observation' has -inf in it: "),
]


# Where the value is: at the root of a frame, after the last frame, at the end of an episode.
@pytest.mark.parametrize("where", [(8, 100), (4, 100), (8, 4)])
@pytest.mark.parametrize(("index", "told", "observation", "message"), NOT_FINITE)
def test_what_is_not_finite_is_refused_unless_the_user_wants_it(
    index: int, told: Any, observation: str, message: str, where: tuple[int, int]
) -> None:
    num_steps, length = where

    def make(context: Any) -> Any:
        row = context.env_index
        env = Told(index, told, observation) if row else CountingEnv(observation=observation)
        env.lengths = (length,)
        return env

    settings: Any = {"frames_per_batch": 2 * num_steps, "envs_per_worker": 2}
    with (
        dc.SyncDataCollector(make, **settings) as collector,
        pytest.raises(dc.EnvError, match=rf"env 1 \(Told\): {message}.*check_nan=False"),
    ):
        collector.next()
    with dc.SyncDataCollector(make, check_nan=False, **settings) as collector:
        batch = collector.next()["next"]
    value = batch["reward" if index else "observation"][1, 3].double()
    assert not value.isfinite().all()


def native(observation: str) -> CountingVectorEnv:
    envs = [CountingEnv(i, observation, lengths=(100,)) for i in range(2)]
    return CountingVectorEnv(envs, AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    ("observation", "index", "told", "match"),
    [
        ("image", 0, np.full((2, 4, 3, 2), 300), "the value 300, which uint8 can't hold"),
        ("image", 0, np.zeros((2, 4, 3, 2)), "dtype float64"),
        ("box32", 0, np.zeros((1, 4), np.float32), r"shape \[1, 4\]"),
        ("box32", 1, [1.0, None], r"returned rewards of shape \[2\] and dtype object"),
        ("box32", 1, np.zeros((2, 1)), r"returned rewards of shape \[2, 1\]"),
        ("box32", 2, [None, False], "returned terminations .* dtype object"),
        ("box32", 3, np.array([0, 2]), "returned truncations with the value 2, which bool"),
    ],
)
def test_vector_env_whose_values_numpy_would_change(
    observation: str, index: int, told: Any, match: str
) -> None:
    env = native(observation)
    right, num_steps = env.step, 0

    def step(actions: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        result = list(right(actions))
        if num_steps == 3:
            result[index] = told
        return tuple(result)

    env.step = step  # type: ignore[method-assign]
    with batch_of(env, 2) as batch:
        batch.reset()
        for _ in range(2):
            batch.step(sample(batch))
        describe = rf"vector env CountingVectorEnv.*: step\(\) .*{match}.* \(step 3\)"
        with pytest.raises(EnvError, match=describe):
            batch.step(sample(batch))


@pytest.mark.parametrize(
    ("later", "match"),
    [
        (0.5, r"'bonus' of shape \[\] and dtype float64, expected \[\] and int64 .*\(step 2\)"),
        (2**70, r"'bonus' of shape \[\] and dtype object"),
        (np.zeros(3, int), r"'bonus' of shape \[3\]"),
    ],
)
def test_later_info_entry_that_numpy_would_change(later: Any, match: str) -> None:
    class Bonus(CountingEnv):
        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return (*result, {"bonus": later if self.facts.step == 2 else 1})

    env = Bonus(lengths=(100,))
    with batch_of(env, 1, info_keys={"bonus": spaces.Box(0, 9, (), np.int64)}) as batch:
        batch.reset()
        batch.step(sample(batch))
        with pytest.raises(EnvError, match=match):
            batch.step(sample(batch))
