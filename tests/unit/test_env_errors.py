"""Bad envs, and envs that raise: each error says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.counting_envs import (
    CountingEnv,
    CountingMaker,
)
from helpers.env_contract import (
    N,
    batch_of,
    contexts,
    sample,
)

from distcollect.envs.make import check_env_id, make_envs
from distcollect.errors import ArgumentError, EnvError, SpaceError


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-same"])
@pytest.mark.parametrize(
    ("info_keys", "error", "match"),
    [
        (["action"], ArgumentError, "already has an entry 'action'"),
        (["observation"], ArgumentError, "already has an entry 'observation'"),
        (["text"], ArgumentError, "'text'.*entries seen: .*flag.*lap.*info_keys={'text'"),
        (["nowhere"], ArgumentError, "no entry 'nowhere'"),
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
    rows = "" if kind == "plain" else "3, "
    shape_error = (
        rf"'pair' of shape \[{rows}2\] and dtype float64, expected \[{rows}3\] and float32"
    )
    with (
        batch_of(CountingMaker(kind, N), info_keys=declared) as batch,
        pytest.raises(EnvError, match=shape_error),
    ):
        batch.reset()


def raising(*_: Any, **__: Any) -> Any:
    raise ValueError("no licence")


SHARED = CountingEnv()


@pytest.mark.parametrize(
    ("create_env", "n", "error", "match"),
    [
        ([CountingEnv, raising], 2, EnvError, r"env 1: raising\(\)"),
        ([CountingEnv], 2, ArgumentError, "the list has 1 env, but 2 are needed"),
        (
            [CountingMaker("sync-next", 2), CountingEnv],
            2,
            ArgumentError,
            "SyncVectorEnv.* is a vector env",
        ),
        (lambda: SHARED, 2, ArgumentError, "env 1 .* is the same object"),
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
        ("CartPoel-v1", r"Did you mean: `CartPole`\?.*if a module"),
        ("CartPole-v9", "`v1`"),
        ("ALE2/Pong-v5", "module:id"),
        ("no_such_module:X-v0", "no_such_module"),
        ("Cart Pole-v1", "Cart Pole"),
    ],
)
def test_bad_env_ids(env_id: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        check_env_id(env_id)


def spoiled(row: int, method: str, change: Callable[[Any], Any]) -> list[Any]:
    """Two envs; in one, ``change`` alters what ``method`` returns."""
    envs = [CountingEnv(i, lengths=(100,)) for i in range(2)]
    right = getattr(envs[row], method)
    setattr(envs[row], method, lambda *args, **kwargs: change(right(*args, **kwargs)))
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


def test_close_closes_all_and_then_raises() -> None:
    envs = spoiled(0, "close", raising)
    batch = make_envs(envs, 2, contexts=contexts(2))
    with pytest.raises(EnvError, match=r"env 0 .*close\(\) raised"):
        batch.close()
    assert envs[1].closed
    batch.close()  # nothing is left to close, so nothing raises
