"""From what the user gives to a batch of envs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium as gym
import torch
from gymnasium.envs.registration import find_highest_version, parse_env_id
from gymnasium.vector import VectorEnv

from distcollect.envs.base import Env, EnvBatch, InfoKeys, Maker, describe, name_of
from distcollect.envs.pettingzoo import PettingZooEnv
from distcollect.envs.single import PlainBatch
from distcollect.envs.vector import VectorBatch
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError, SpaceError
from distcollect.rollout.spaces import leaves_of


@dataclass(frozen=True)
class EnvContext:
    """Which env is being made; given to makers that have a parameter named ``context``.

    Attributes:
        worker_id: the worker that makes it; 0 in :class:`~distcollect.SyncDataCollector`.
        env_index: the env's index within the worker; 0 for a maker of a vector env.
        incarnation: counts the processes that this worker has had, from 0.
        seed: None: envs are made before they are seeded, and get their seed by ``reset``.
    """

    worker_id: int
    env_index: int
    incarnation: int
    seed: int | None


def check_env_id(env_id: str) -> None:
    """Raise ArgumentError, with Gymnasium's suggestion, if no such env is registered.

    Nothing is made, but the module in "module:id" is imported.
    """
    module, colon, name = env_id.rpartition(":")
    if colon:
        _import_for(env_id, module)
    try:
        namespace, base, version = parse_env_id(name)
        if version is None and find_highest_version(namespace, base) is not None:
            return
        gym.spec(name)
    except gym.error.Error as err:
        raise ArgumentError(
            f"no env {env_id!r}: {str(err).rstrip('.')}. The module that registers an env can be "
            "named with it: 'module:id'"
        ) from err


def _import_for(env_id: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise ArgumentError(
            f"no env {env_id!r}: {err}. What stands before the colon of 'module:id' has to be a "
            "module that can be imported here"
        ) from err
    except Exception as err:
        raise ArgumentError(
            f"no env {env_id!r}: importing the module {module!r} raised {describe(err)}"
        ) from err


def make_envs(
    create_env: Maker | Sequence[Maker],
    num_envs: int,
    *,
    info_keys: InfoKeys | None = None,
    contexts: Sequence[EnvContext],
    device: torch.device | None = None,
) -> EnvBatch:
    """Make the envs of one worker.

    Args:
        create_env: an env id; a callable that returns an env, a vector env, a TorchRL env or a
            parallel env of PettingZoo (if it has a parameter named ``context``, it is given one);
            an instance; or a list of these, one plain env each.
        num_envs: how many envs. A vector env, or a TorchRL env with a batch size, may have this
            many rows, or any number if it is 1.
        info_keys: entries of ``info`` that frames carry; a mapping gives their spaces (None: find
            out), where a nested entry is a Dict space. Missing values are NaN, False or 0.
        contexts: one for each env.
        device: where TorchRL envs compute; None: where they are made. Others have no choice.

    Raises:
        ArgumentError: numbers that don't fit, or an info entry that nothing is known of.
        SpaceError: a space that no batch can carry, or envs whose spaces differ.
        ArgumentTypeError: ``create_env`` is none of these.
        EnvError: a callable raised or returned something else, or an env raised.
    """
    listed = isinstance(create_env, list | tuple)
    makers = (
        list(cast("Sequence[Maker]", create_env))
        if listed
        else [cast("Maker", create_env)] * num_envs
    )
    if len(makers) != num_envs:
        raise ArgumentError(
            f"{len(makers)} envs are listed, but there are to be {num_envs}: list as many"
        )
    given = list(zip(makers, contexts, strict=True))
    envs: list[Any] = []
    opened: list[Any] = []
    try:
        for row, (maker, context) in enumerate(given):
            env = _make(maker, row, context, device)
            if not is_env(maker):
                opened.append(env)
            envs.append(env)
            num_rows = _num_rows(env)
            if num_rows is not None:
                _check_rows(env, num_rows, num_envs, alone=not listed and row == 0)
                break
        remakers = [_remaker(maker, row, ctx, device) for row, (maker, ctx) in enumerate(given)]
        return _batch(envs, info_keys, remakers[: len(envs)])
    except BaseException:
        for env in opened:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                env.close()
        raise


def is_env(value: object) -> bool:
    """Whether ``value`` is an env of a kind that can be stepped here."""
    return isinstance(value, gym.Env | VectorEnv) or _is_torchrl(value) or _is_pettingzoo(value)


def _is_torchrl(value: object) -> bool:
    # Where torchrl was never imported nothing is an env of it, and importing it has side effects.
    module = sys.modules.get("torchrl.envs.common")
    return module is not None and isinstance(value, module.EnvBase)


def _is_pettingzoo(value: object) -> bool:
    module = sys.modules.get("pettingzoo.utils.env")
    return module is not None and isinstance(value, module.ParallelEnv)


def _num_rows(env: Any) -> int | None:
    """How many rows an env steps at once; None for one that has no such dimension."""
    if _is_torchrl(env):
        return env.batch_size.numel() if env.batch_size else None
    return env.num_envs if isinstance(env, VectorEnv) else None


def _batch(
    envs: list[Any], info_keys: InfoKeys | None, makers: list[Callable[[], Any] | None]
) -> EnvBatch:
    """The batch for envs of one kind: plain ones, or a single one of several rows."""
    _check_distinct(envs)
    if any(map(_is_torchrl, envs)):
        if not all(map(_is_torchrl, envs)):
            raise ArgumentError(
                "TorchRL envs and others can't be listed together: use envs of one kind, such as "
                "TorchRL's GymEnv for those of Gymnasium"
            )
        if info_keys:
            raise ArgumentError(
                "info_keys: a TorchRL env brings them along itself, see its set_info_dict_reader"
            )
        from distcollect.envs.torchrl import TorchRLBatch  # noqa: PLC0415 - see _is_torchrl

        return TorchRLBatch(envs, makers)
    if isinstance(envs[0], VectorEnv):
        return VectorBatch(envs[0], info_keys, makers[0])
    _check_alike(envs)
    return PlainBatch(envs, info_keys, makers)


def _remaker(
    maker: Maker, row: int, context: EnvContext, device: torch.device | None
) -> Callable[[], Any] | None:
    """What makes the env of a row once more; None for an instance."""
    if is_env(maker):
        return None
    return partial(_make, maker, row, context, device)


def _make(maker: Maker, row: int, context: EnvContext, device: torch.device | None) -> Any:
    # Instances first: an env may be callable too.
    env: Any = maker if is_env(maker) else _called(maker, row, context)
    if _is_pettingzoo(env):
        return PettingZooEnv(env)
    return env.to(device) if device is not None and _is_torchrl(env) else env


def _called(maker: Maker, row: int, context: EnvContext) -> Any:
    if isinstance(maker, str):
        check_env_id(maker)
        name = f"gymnasium.make({maker!r})"
    elif callable(maker):
        name = f"{getattr(maker, '__qualname__', type(maker).__name__)}()"
    else:
        raise ArgumentTypeError(
            "envs are given as an env id, a callable, an env, a vector env, or a list of these, "
            f"not as {type(maker).__name__}"
        )
    try:
        if isinstance(maker, str):
            env: Any = gym.make(maker)
        else:
            env = maker(context=context) if _takes_context(maker) else maker()
    except Exception as err:
        raise EnvError(f"env {row}: {name} raised {describe(err)}") from err
    if not is_env(env):
        kind = f"{type(env).__module__}.{type(env).__qualname__}"
        raise EnvError(
            f"env {row}: {name} returned a {kind}, not a gymnasium Env or VectorEnv, nor a TorchRL "
            "EnvBase or a PettingZoo ParallelEnv"
        )
    return env


def _takes_context(maker: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(maker).parameters.get("context")
    except (TypeError, ValueError):  # some builtins have none
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _check_rows(env: Any, num_rows: int, num_envs: int, *, alone: bool) -> None:
    if not alone:
        raise ArgumentError(
            f"{env} is a vector env, but each env of a list must be a plain one: give it alone"
        )
    if num_envs not in (1, num_rows):
        raise ArgumentError(
            f"{env} has {num_rows} envs, but there are to be {num_envs}: ask for "
            f"{num_rows}, or for 1 to take it as it is"
        )


def _check_distinct(envs: Sequence[Any]) -> None:
    for row, env in enumerate(envs):
        if any(env is other for other in envs[:row]):
            raise ArgumentError(
                f"env {row} ({env}) is the same object as another one; each row needs an env of "
                "its own, so give a callable that makes one"
            )


def _check_alike(envs: Sequence[Env]) -> None:
    """Envs of one batch have the same spaces."""
    first = envs[0]
    for row, env in enumerate(envs):
        for role in ("observation", "action"):
            mine, theirs = getattr(env, f"{role}_space"), getattr(first, f"{role}_space")
            # The bounds of observations may differ, but what an action means may not.
            same = leaves_of(mine, role) == leaves_of(theirs, role)
            if not same or (role == "action" and mine != theirs):
                raise SpaceError(
                    f"env {row} ({name_of(env)}) has another {role} space than env 0 "
                    f"({name_of(first)}): {mine} instead of {theirs}; all envs of a worker must "
                    "have the same spaces"
                )
