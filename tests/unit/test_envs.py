"""Every kind of env keeps the same contract, and every bad input says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ale_py
import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, TransformObservation
from gymnasium.wrappers import vector as vector_wrappers
from helpers import counting
from helpers.counting import (
    ACTIONS,
    ENV_KINDS,
    FILLER_KINDS,
    OBSERVATIONS,
    UNCUTTABLE_KINDS,
    VECTOR_KINDS,
    CountingEnv,
    CountingMaker,
    Frame,
    check_frames,
)

from distcollect.common.seeding import env_seed
from distcollect.envs.base import EnvBatch
from distcollect.envs.make import EnvContext, check_env_id, make_envs
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError, SpaceError
from distcollect.rollout.spaces import Arrays, Key, flatten

N = 3
INFO_KEYS = ["lap", "ratio", "flag", "pair", "nest", "stepped", "odd"]
INFO_LEAVES: list[Key] = [("lap",), ("ratio",), ("flag",), ("pair",), ("stepped",), ("odd",)]
INFO_LEAVES += [("nest", "depth"), ("nest", "deeper", "echo")]


def contexts(n: int) -> list[EnvContext]:
    return [EnvContext(worker_id=0, env_index=i, incarnation=0, seed=None) for i in range(n)]


@contextmanager
def batch_of(create_env: Any, n: int = N, **kwargs: Any) -> Iterator[EnvBatch]:
    batch = make_envs(create_env, n, contexts=contexts(n), **kwargs)
    try:
        yield batch
    finally:
        batch.close()


def rows_of(batch: EnvBatch) -> range:
    return range(batch.num_envs)


def sample(batch: EnvBatch) -> Arrays:
    space = batch.action_space
    parts = [list(flatten(space, space.sample())) for _ in rows_of(batch)]
    return {
        leaf.key: np.stack([row[i] for row in parts]).astype(leaf.numpy_dtype)
        for i, leaf in enumerate(batch.action_leaves)
    }


def drive(batch: EnvBatch, num_steps: int, cut_after: int | None = None) -> list[list[Frame]]:
    """Step with random actions from one and the same memory; each row's real frames."""
    frames: list[list[Frame]] = [[] for _ in rows_of(batch)]
    at_start = dict(batch.obs)
    action = sample(batch)
    since = np.zeros(batch.num_envs, int)
    for _ in range(num_steps):
        for key, drawn in sample(batch).items():
            action[key][...] = drawn
        root = {key: array.copy() for key, array in batch.obs.items()}
        taken = {key: array.copy() for key, array in action.items()}
        since += 1
        cut = None if cut_after is None else since >= cut_after
        reward, terminated, truncated, ended, real = batch.step(action, cut)
        assert ended == np.flatnonzero(terminated | truncated).tolist()
        assert reward.dtype == np.float32
        for row in rows_of(batch):
            if real is not None and not real[row]:
                assert row not in ended
                continue
            after = batch.final if row in ended else batch.obs
            frames[row].append(
                Frame(
                    {key: array[row].copy() for key, array in root.items()},
                    {key: array[row] for key, array in taken.items()},
                    reward[row],
                    {key: array[row].copy() for key, array in after.items()},
                    terminated[row],
                    truncated[row],
                )
            )
        since[ended] = 0
    assert all(batch.obs[key] is array for key, array in at_start.items())
    return frames


@pytest.mark.parametrize("kind", ENV_KINDS)
@pytest.mark.parametrize("info_keys", [None, INFO_KEYS], ids=["", "infos"])
def test_every_kind_keeps_the_contract(kind: str, info_keys: list[str] | None) -> None:
    leaves = INFO_LEAVES if info_keys else []
    with batch_of(CountingMaker(kind, N, "dict", "dict"), info_keys=info_keys) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 40)):
            count = check_frames(
                frames, number=number, observation="dict", action="dict", info_keys=leaves
            )
            assert count == 40 or kind in FILLER_KINDS
            assert count >= 25


@pytest.mark.parametrize("kind", [kind for kind in ENV_KINDS if kind not in UNCUTTABLE_KINDS])
@pytest.mark.parametrize("cut_after", [1, 3])
def test_rows_can_be_cut(kind: str, cut_after: int) -> None:
    with batch_of(CountingMaker(kind, N), info_keys=INFO_KEYS) as batch:
        assert batch.supports_partial_reset
        batch.reset()
        for number, frames in enumerate(drive(batch, 20, cut_after)):
            check_frames(frames, number=number, cut_after=cut_after, info_keys=INFO_LEAVES)


@pytest.mark.parametrize("kind", UNCUTTABLE_KINDS)
def test_rows_that_cannot_be_cut_say_so(kind: str) -> None:
    with batch_of(CountingMaker(kind, N)) as batch:
        assert not batch.supports_partial_reset
        batch.reset()
        with pytest.raises(ArgumentError, match="can't be cut"):
            batch.step(sample(batch), np.ones(N, bool))


@pytest.mark.parametrize(
    "kind", ["plain", "plain-reuse", "sync-same", "async-next-live", "native-same"]
)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_every_observation_space(kind: str, observation: str) -> None:
    with batch_of(CountingMaker(kind, N, observation)) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 15)):
            check_frames(frames, number=number, observation=observation)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "async-disabled", "native-next"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space(kind: str, action: str) -> None:
    with batch_of(CountingMaker(kind, N, action=action)) as batch:
        batch.reset()
        for number, frames in enumerate(drive(batch, 15)):
            check_frames(frames, number=number, action=action)


@pytest.mark.parametrize("action", ACTIONS)
def test_plain_envs_get_actions_of_the_types_that_are_sampled(action: str) -> None:
    env = CountingEnv(action=action)
    with batch_of(env, 1) as batch:
        batch.reset()
        batch.step(sample(batch))
    [(taken, _)] = env.kept_actions
    sampled = env.action_space.sample()
    pairs = zip(flatten(env.action_space, taken), flatten(env.action_space, sampled), strict=True)
    assert type(taken) is type(sampled)
    assert all(type(mine) is type(its) and mine.dtype == its.dtype for mine, its in pairs)


@pytest.mark.parametrize("kind", ["plain", *VECTOR_KINDS])
def test_reset_in_mid_episode(kind: str) -> None:
    with batch_of(CountingMaker(kind, N)) as batch:
        for steps in (1, 1, 2, 3, 4, 5, 20):
            batch.reset()
            for number, frames in enumerate(drive(batch, steps)):
                check_frames(frames, number=number)


def test_fillers_are_marked_and_keep_the_final_observation() -> None:
    with batch_of(CountingMaker("native-next", 1, lengths=(2,)), 1) as batch:
        batch.reset()
        assert batch.step(sample(batch)).real is None
        assert batch.step(sample(batch)).ended == [0]
        last = batch.obs["observation",].copy()
        assert (last == batch.final["observation",]).all()
        result = batch.step(sample(batch))
        assert result.real is not None
        assert not result.real.any()
        assert not result.ended
        assert not result.reward.any()
        assert batch.obs["observation",][0].tolist() == [0, 1, 0, 0]


def test_seeds_reach_each_env() -> None:
    envs = [CountingEnv(i) for i in range(N)]
    with batch_of(envs) as batch:
        batch.reset([5, 3, 9])
        drive(batch, 10)
    assert [env.seeds[:2] for env in envs] == [[5, None], [3, None], [9, None]]
    assert all(env.closed for env in envs)


@pytest.mark.parametrize("kind", ["sync-next", "native-next"])
def test_seeds_reach_vector_envs(kind: str) -> None:
    env: Any = CountingMaker(kind, 2)()
    with batch_of(env, 2) as batch:
        batch.reset([5, 8])
    assert [each.seeds for each in env.envs] == [[5], [8 if kind == "sync-next" else 6]]


# Episode statistics


def statistics_of(create_env: Any, num_steps: int) -> None:
    with batch_of(create_env, info_keys=["episode"]) as batch:
        batch.reset()
        returns = np.zeros(batch.num_envs)
        lengths = np.zeros(batch.num_envs, int)
        seen = 0
        for _ in range(num_steps):
            result = batch.step(sample(batch))
            real = np.ones(batch.num_envs, bool) if result.real is None else result.real
            returns += result.reward * real
            lengths += real
            for row in result.ended:
                assert batch.final["episode", "r"][row] == pytest.approx(returns[row])
                assert batch.final["episode", "l"][row] == lengths[row]
                returns[row] = lengths[row] = 0
                seen += 1
            running = [row for row in rows_of(batch) if row not in result.ended]
            assert np.isnan(batch.obs["episode", "r"][running]).all()
            assert not batch.obs["episode", "l"][running].any()
            if (
                batch.supports_partial_reset
            ):  # a row that can't be reset at once still shows its final values
                assert np.isnan(batch.obs["episode", "r"][result.ended]).all()
        assert seen > num_steps // 2
        assert batch.obs["episode", "r"].dtype == np.float32


def test_episode_statistics_of_plain_envs() -> None:
    statistics_of([RecordEpisodeStatistics(CountingEnv(i)) for i in range(N)], 20)


@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_episode_statistics_of_the_vector_wrapper(kind: str) -> None:
    env: Any = CountingMaker(kind, N)()
    if "nolabel" in kind:
        with pytest.warns(UserWarning, match="autoreset_mode"):
            env = vector_wrappers.RecordEpisodeStatistics(env)
    else:
        env = vector_wrappers.RecordEpisodeStatistics(env)
    statistics_of(env, 20)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_episode_statistics_inside_a_vector_env(mode: str) -> None:
    makers = [lambda i=i: RecordEpisodeStatistics(CountingEnv(i)) for i in range(N)]
    statistics_of(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode), 20)


def test_wrappers_that_refuse_partial_resets_get_fillers() -> None:
    def make() -> Any:
        env: Any = CountingMaker("sync-next", N)()
        return vector_wrappers.NormalizeObservation(env)

    with batch_of(make) as batch:
        assert not batch.supports_partial_reset
        batch.reset()
        assert any(batch.step(sample(batch)).real is not None for _ in range(10))


@pytest.mark.parametrize("kind", ["sync-next-live", "async-next-live"])
def test_wrappers_that_change_live_arrays_in_place(kind: str) -> None:
    # A masked reset runs such a wrapper over all rows, so over most of them a second time.
    env: Any = CountingMaker(kind, N, lengths=(2, 5))()
    space = env.single_observation_space
    env = vector_wrappers.VectorizeTransformObservation(
        env, TransformObservation, func=lambda obs: obs + 1000, observation_space=space
    )
    with batch_of(env) as batch:
        batch.reset()
        for _ in range(12):
            batch.step(sample(batch))
            assert (batch.obs["observation",] // 1000 == 1).all()


# Info entries


def test_declared_info_spaces_are_taken() -> None:
    declared = {
        "pair": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "nowhere": spaces.Dict({"x": spaces.Discrete(3), "y": spaces.Box(0, 1, (2,))}),
        "lap": None,
    }
    for kind in ("plain", "sync-next", "native-same"):
        with batch_of(CountingMaker(kind, N), info_keys=declared) as batch:
            batch.reset()
            drive(batch, 6)
            assert batch.obs["pair",].dtype == np.float32
            assert batch.obs["pair",][:, 0] == pytest.approx([1 / 3, 4 / 3, 7 / 3])
            assert not batch.obs["nowhere", "x"].any()
            assert np.isnan(batch.obs["nowhere", "y"]).all()


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-same"])
@pytest.mark.parametrize(
    ("info_keys", "error", "match"),
    [
        (["action"], ArgumentError, "already has an entry 'action'"),
        (["observation"], ArgumentError, "already has an entry 'observation'"),
        (["text"], ArgumentError, "'text'.*entries seen: .*flag.*lap.*info_keys={'text'"),
        (["nowhere"], ArgumentError, "nothing under 'nowhere'"),
        ("lap", ArgumentTypeError, "info_keys='lap': must be a list"),
        ({"lap": spaces.Text(3)}, SpaceError, "lap: a Text space"),
        ({"lap": spaces.Tuple([spaces.Discrete(3)])}, SpaceError, "'lap' is a Tuple"),
    ],
)
def test_bad_info_keys(kind: str, info_keys: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_envs(CountingMaker(kind, N), N, info_keys=info_keys, contexts=contexts(N))


@pytest.mark.parametrize("kind", ["plain", "sync-next"])
def test_info_entry_of_another_shape_than_declared(kind: str) -> None:
    declared = {"pair": spaces.Box(0, 1, (3,))}
    shape_error = r"'pair' has shape \[2\], expected \[3\]"
    with (
        batch_of(CountingMaker(kind, N), info_keys=declared) as batch,
        pytest.raises(EnvError, match=shape_error),
    ):
        batch.reset()


# What may be given


@pytest.mark.parametrize(
    ("create_env", "n", "rows"),
    [
        (CountingMaker(), 2, 2),
        (CountingEnv, 2, 2),
        ("CartPole-v1", 2, 2),
        (["CartPole-v1", lambda: gym.make("CartPole-v1")], 2, 2),
        (CountingMaker("sync-next", 4), 4, 4),
        (CountingMaker("sync-next", 4), 1, 4),
    ],
)
def test_what_may_be_given(create_env: Any, n: int, rows: int) -> None:
    with batch_of(create_env, n) as batch:
        assert batch.num_envs == rows
        batch.reset()
        batch.step(sample(batch))


def test_instances_are_not_called() -> None:
    class CallableEnv(CountingEnv):
        def __call__(self) -> Any:
            raise AssertionError("called")

    for given in (CallableEnv(), [CallableEnv()]):
        with batch_of(given, 1) as batch:
            assert batch.num_envs == 1


def test_context_is_given_to_makers_that_ask() -> None:
    seen = []

    def make(*, context: EnvContext) -> Any:
        seen.append(context)
        return CountingEnv(context.env_index)

    with batch_of(make, 2):
        assert seen == contexts(2)


def test_makers_travel() -> None:
    maker = cloudpickle.loads(cloudpickle.dumps(CountingMaker("sync-next", 2)))
    assert maker == CountingMaker("sync-next", 2)


def raising(*_: Any, **__: Any) -> Any:
    raise ValueError("no licence")


SHARED = CountingEnv()


@pytest.mark.parametrize(
    ("create_env", "n", "error", "match"),
    [
        (3, 1, ArgumentTypeError, "not as int"),
        ("CartPol-v1", 1, ArgumentError, "Did you mean: `CartPole`"),
        (raising, 1, EnvError, r"env 0: raising\(\) raised ValueError: no licence"),
        (lambda: 3, 1, EnvError, "returned a builtins.int, not a gymnasium Env"),
        ([CountingEnv, raising], 2, EnvError, r"env 1: raising\(\)"),
        ([CountingEnv], 2, ArgumentError, "the list has 1 envs, but 2 are needed"),
        (
            [CountingEnv, CountingMaker("sync-next", 2)],
            2,
            ArgumentError,
            "SyncVectorEnv.* is a vector env",
        ),
        (
            [CountingMaker("sync-next", 2), CountingEnv],
            2,
            ArgumentError,
            "SyncVectorEnv.* is a vector env",
        ),
        (CountingMaker("sync-next", 2), 3, ArgumentError, "has 2 envs, but there are to be 3"),
        (lambda: SHARED, 2, ArgumentError, "env 1 .* is the same object"),
        (SHARED, 2, ArgumentError, "env 1 .* is the same object"),
        (
            [CountingEnv, lambda: CountingEnv(observation="box64")],
            2,
            SpaceError,
            r"env 1 \(CountingEnv\) has another observation space .*float64.* instead of .*float32",
        ),
        (
            [CountingEnv, lambda: CountingEnv(action="discrete_start")],
            2,
            SpaceError,
            r"env 1 .* another action space .*: Discrete\(4, start=-2\) instead of Discrete\(5\)",
        ),
    ],
)
def test_bad_envs(create_env: Any, n: int, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_envs(create_env, n, contexts=contexts(n))


def test_envs_made_so_far_are_closed_when_one_fails() -> None:
    made, given = CountingEnv(), CountingEnv()
    with pytest.raises(EnvError):
        make_envs([lambda: made, given, raising], 3, contexts=contexts(3))
    assert made.closed
    assert not given.closed


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CartPole", "gymnasium.envs:CartPole-v1"])
def test_good_env_ids(env_id: str) -> None:
    check_env_id(env_id)


@pytest.mark.parametrize(
    ("env_id", "match"),
    [
        ("CartPole-v9", "`v1`"),
        ("ALE2/Pong-v5", "module:id"),
        ("no_such_module:X-v0", "no_such_module"),
        ("Cart Pole-v1", "Cart Pole"),
    ],
)
def test_bad_env_ids(env_id: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        check_env_id(env_id)


# Envs that break their promises


def spoiled(row: int, method: str, change: Callable[[Any], Any], after: int = 0) -> list[Any]:
    """Two envs, one of which changes what ``method`` returns from its ``after``-th call on."""
    envs = [CountingEnv(i, lengths=(100,)) for i in range(2)]
    right, calls = getattr(envs[row], method), 0

    def wrong(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = right(*args, **kwargs)
        return change(result) if calls > after else result

    setattr(envs[row], method, wrong)
    return envs


MISFITS = [
    (lambda obs: obs[:3], r"'observation' of shape \[3\].* says \[4\] and float32"),
    (lambda obs: obs[:1], r"shape \[1\]"),
    (lambda obs: obs[None], r"shape \[1, 4\]"),
    (lambda _: np.float32(0), r"shape \[\]"),
    (lambda _: None, r"dtype object"),
]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(("change", "match"), MISFITS)
def test_observation_that_does_not_fit(
    row: int, method: str, change: Callable[[Any], Any], match: str
) -> None:
    envs = spoiled(row, method, lambda result: (change(result[0]), *result[1:]))
    with batch_of(envs, 2) as batch:
        if method == "step":
            batch.reset()
        call = batch.reset if method == "reset" else lambda: batch.step(sample(batch))
        with pytest.raises(EnvError, match=rf"env {row} \(CountingEnv\): {method}\(\) .*{match}"):
            call()


def test_observation_that_stops_fitting() -> None:
    envs = spoiled(1, "step", lambda result: (result[0][:3], *result[1:]), after=4)
    with batch_of(envs, 2) as batch:
        batch.reset()
        for _ in range(4):
            batch.step(sample(batch))
        with pytest.raises(EnvError, match=r"env 1 .*shape \[3\]"):
            batch.step(sample(batch))


def test_fractions_do_not_become_integers() -> None:
    def make() -> Any:
        space = OBSERVATIONS["image"].space
        return TransformObservation(CountingEnv(observation="image"), lambda x: x / 255, space)

    with batch_of(make, 1) as batch, pytest.raises(EnvError, match=r"float64.*uint8"):
        batch.reset()


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("row", [0, 1])
def test_step_that_raises(row: int, after: int) -> None:
    envs = spoiled(row, "step", raising, after)
    with batch_of(envs, 2) as batch:
        batch.reset()
        for _ in range(after):
            batch.step(sample(batch))
        with pytest.raises(EnvError) as caught:
            batch.step(sample(batch))
    assert str(caught.value) == f"env {row} (CountingEnv): step() raised ValueError: no licence"
    assert isinstance(caught.value.__cause__, ValueError)


def test_reset_that_raises() -> None:
    envs = spoiled(1, "reset", raising)
    describe = r"env 1 .*reset\(\) raised ValueError: no licence"
    with batch_of(envs, 2) as batch, pytest.raises(EnvError, match=describe):
        batch.reset()


def test_close_closes_all_and_then_raises() -> None:
    envs = spoiled(0, "close", raising)
    batch = make_envs(envs, 2, contexts=contexts(2))
    with pytest.raises(EnvError, match=r"env 0 .*close\(\) raised"):
        batch.close()
    assert envs[1].closed


def test_env_of_the_old_api() -> None:
    envs = spoiled(1, "step", lambda result: result[:4])
    with batch_of(envs, 2) as batch:
        batch.reset()
        with pytest.raises(EnvError, match=r"env 1 .*old gym"):
            batch.step(sample(batch))


@pytest.mark.filterwarnings("ignore::UserWarning")  # how AsyncVectorEnv logs it
@pytest.mark.parametrize("kind", ["sync-next", "async-next", "native-same"])
def test_vector_env_that_raises(kind: str) -> None:
    with batch_of(CountingMaker(kind, 2), 2) as batch:
        batch.reset()
        wrong: Arrays = {("action",): np.array([0, 77])}
        with pytest.raises(EnvError, match=r"vector env .*step\(\) raised AssertionError: .*77"):
            batch.step(wrong)


def test_vector_env_with_rows_of_another_shape() -> None:
    class Short(counting.CountingVectorEnv):
        def _show(self) -> Any:
            return super()._show()[:, :3]

    env = Short([CountingEnv(i) for i in range(2)], None)
    describe = r"shape \[2, 3\].* says \[2, 4\]"
    with batch_of(env, 2) as batch, pytest.raises(EnvError, match=describe):
        batch.reset()


# Real envs


def assert_same_as_sync_vector_env(env_id: str, num_steps: int) -> None:
    n = 2
    reference: Any = gym.make_vec(
        env_id, n, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )
    with batch_of(env_id, n) as batch:
        batch.reset([3, 4])
        obs, _ = reference.reset(seed=[3, 4])
        for _ in range(num_steps):
            assert (batch.obs["observation",] == obs).all()
            action = sample(batch)
            obs, reward, terminated, truncated, infos = reference.step(action["action",])
            result = batch.step(action)
            assert (result.reward == reward.astype(np.float32)).all()
            assert (result.terminated == terminated).all()
            assert (result.truncated == truncated).all()
            for row in result.ended:
                assert (batch.final["observation",][row] == infos["final_obs"][row]).all()
        assert batch.obs["observation",].dtype == reference.observation_space.dtype
    reference.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Hopper-v5"])
def test_plain_envs_give_what_gymnasium_gives(env_id: str) -> None:
    assert_same_as_sync_vector_env(env_id, 300)


def test_native_cartpole() -> None:
    def make() -> Any:
        return gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")

    with batch_of(make, 4) as batch:
        batch.reset([7, 8, 9, 10])
        fillers = ends = 0
        for _ in range(200):
            result = batch.step(sample(batch))
            ends += len(result.ended)
            fillers += 0 if result.real is None else int((~result.real).sum())
        assert ends > 10
        assert ends - 4 <= fillers <= ends


def test_every_seed_suits_native_envs() -> None:
    with batch_of(ale_py.AtariVectorEnv("pong", 2), 2) as batch:
        for seed in range(20):
            batch.reset([env_seed(seed, index) for index in range(2)])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_native_atari(mode: str) -> None:
    env = ale_py.AtariVectorEnv("pong", 2, max_num_frames_per_episode=60, autoreset_mode=mode)
    with batch_of(env, 2, info_keys=["lives"]) as batch:
        batch.reset([1, 2])
        ends = 0
        for _ in range(60):
            result = batch.step(sample(batch))
            ends += len(result.ended)
            if result.ended and mode != "NextStep":
                row = result.ended[0]
                assert (batch.obs["observation",][row] != batch.final["observation",][row]).any()
        assert ends >= 4
        assert batch.obs["observation",].dtype == np.uint8
