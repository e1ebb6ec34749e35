"""Makes a batch of envs from what the user passes as ``create_env_fn``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium as gym
import torch
from gymnasium.envs.registration import find_highest_version, parse_env_id

from distcollect.envs.base import Envs, InfoKeys, Maker, describe
from distcollect.envs.kinds import EnvKind, is_env, kind_of
from distcollect.envs.vector_ids import VectorMaker, vector_maker
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError


@dataclass(frozen=True)
class EnvContext:
    """Describes the env to make; passed to makers that have a parameter named ``context``.

    Attributes:
        worker_id: the worker that makes it; 0 in :class:`~distcollect.SyncDataCollector`.
        env_index: the env's index within the worker; 0 for a maker of a vector env.
        incarnation: number of the process in the worker's slot, counted from 0.
        seed: always None: envs get their seed later, by ``reset``.
        for_evaluation: whether the env is one in which the policy is evaluated; no batch has frames
            of it.
    """

    worker_id: int
    env_index: int
    incarnation: int
    seed: int | None
    for_evaluation: bool = False


def check_env_id(env_id: str) -> None:
    """Raise ArgumentError, with Gymnasium's suggestion, if no such env is registered.

    It makes no env, but imports the module of a "module:id".
    """
    vector = vector_maker(env_id)
    if vector is not None:
        vector.check()
        return
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
            f"no env {env_id!r}: {str(err).rstrip('.')}. If a module has to be imported to "
            "register the env, write 'module:id'"
        ) from err


def make_by_id(env_id: str) -> Any:
    """Make the env of an id; with a single row if the id is one of a vector env."""
    vector = vector_maker(env_id)
    return gym.make(env_id) if vector is None else vector()


def _import_for(env_id: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise ArgumentError(
            f"no env {env_id!r}: {err}. The part before the colon of 'module:id' must be a module "
            "that can be imported here"
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
) -> Envs:
    """Make the envs of one worker.

    Args:
        create_env: an env id, of Gymnasium or of :mod:`.vector_ids`; a callable that returns an
            env, a vector env, a TorchRL env or a parallel env of PettingZoo (a parameter named
            ``context`` gets an :class:`EnvContext`); an env; or a list of these, one single env
            each.
        num_envs: how many envs. A vector env, or a TorchRL env with a batch size, must have this
            many rows; if ``num_envs`` is 1 it may have any number.
        info_keys: entries of ``info`` that frames carry: names, or a mapping from names to spaces
            (None: infer the space). A nested entry has a Dict space. Missing values are NaN, False
            or 0.
        contexts: one for each env.
        device: where TorchRL envs compute; None: they are not moved. Other envs ignore it.

    Raises:
        ArgumentError: the numbers of envs don't match, or the space of an info entry is unknown.
        ArgumentTypeError: ``create_env`` is none of the above.
        SpaceError: no batch can carry the space, or the envs' spaces differ.
        EnvError: a callable raised or returned something that is no env, or an env raised.
    """
    vector = vector_maker(create_env, num_envs)
    if vector is not None:
        vector.check()
        create_env = vector
    listed = isinstance(create_env, list | tuple)
    makers = (
        list(cast("Sequence[Maker]", create_env))
        if listed
        else [cast("Maker", create_env)] * num_envs
    )
    if len(makers) != num_envs:
        raise ArgumentError(
            f"the list has {len(makers)} envs, but {num_envs} are needed: list as many"
        )
    makers_and_contexts = list(zip(makers, contexts, strict=True))
    envs: list[Any] = []
    opened: list[Any] = []
    try:
        for row, (maker, context) in enumerate(makers_and_contexts):
            env = _make(maker, row, context, device)
            if not is_env(maker):
                opened.append(env)
            envs.append(env)
            num_rows = _kind_of(env).num_rows(env)
            if num_rows is not None:
                _check_rows(env, num_rows, num_envs, alone=not listed and row == 0)
                break
        remakers = [
            _remaker(maker, row, context, device)
            for row, (maker, context) in enumerate(makers_and_contexts)
        ]
        return _batch(envs, info_keys, remakers[: len(envs)])
    except BaseException:
        for env in opened:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                env.close()
        raise


def _batch(
    envs: list[Any], info_keys: InfoKeys | None, makers: list[Callable[[], Any] | None]
) -> Envs:
    """The batch for envs of one kind: single envs, or one env of several rows."""
    _check_distinct(envs)
    kinds = [_kind_of(env) for env in envs]
    if len(set(kinds)) > 1:
        library = next(kind.library for kind in kinds if kind.library != EnvKind.library)
        raise ArgumentError(
            f"a list can't mix {library} envs and others: use envs of one kind, for example "
            "TorchRL's GymEnv for those of Gymnasium"
        )
    return kinds[0].batch(envs, info_keys, makers)


def _remaker(
    maker: Maker, row: int, context: EnvContext, device: torch.device | None
) -> Callable[[], Any] | None:
    """What makes the env of a row again; None if the user passed an env object."""
    if is_env(maker):
        return None
    if isinstance(maker, VectorMaker):
        return maker
    return partial(_make, maker, row, context, device)


def _make(maker: Maker, row: int, context: EnvContext, device: torch.device | None) -> Any:
    # First look for an env: it may be callable, too.
    env: Any = maker if is_env(maker) else _call_maker(maker, row, context)
    return _kind_of(env).prepared(env, device)


def _kind_of(env: object) -> EnvKind:
    kind = kind_of(env)
    assert kind is not None
    return kind


def _call_maker(maker: Maker, row: int, context: EnvContext) -> Any:
    if isinstance(maker, str):
        check_env_id(maker)
        name = f"gymnasium.make({maker!r})"
    elif callable(maker):
        name = f"{getattr(maker, '__qualname__', type(maker).__name__)}()"
        if isinstance(maker, VectorMaker):
            name = maker.env_id
    else:
        raise ArgumentTypeError(
            "create_env_fn must be an env id, a callable, an env, a vector env, or a list of "
            f"these, not {type(maker).__name__}"
        )
    try:
        if isinstance(maker, str):
            env: Any = make_by_id(maker)
        else:
            env = maker(context=context) if _takes_context(maker) else maker()
    except Exception as err:
        raise EnvError(f"env {row}: {name} raised {describe(err)}") from err
    if not is_env(env):
        kind = f"{type(env).__module__}.{type(env).__qualname__}"
        raise EnvError(
            f"env {row}: {name} returned a {kind}; it must return a gymnasium Env or VectorEnv, "
            "a TorchRL EnvBase or a PettingZoo ParallelEnv"
        )
    return env


def _takes_context(maker: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(maker).parameters.get("context")
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _check_rows(env: Any, num_rows: int, num_envs: int, *, alone: bool) -> None:
    if not alone:
        raise ArgumentError(
            f"{env} is a vector env, but a list must contain single envs: pass it without a list"
        )
    if num_envs not in (1, num_rows):
        raise ArgumentError(
            f"{env} has {num_rows} envs, but {num_envs} are asked for: ask for {num_rows}, or "
            "for 1 to use it as it is"
        )


def _check_distinct(envs: Sequence[Any]) -> None:
    for row, env in enumerate(envs):
        if any(env is other for other in envs[:row]):
            raise ArgumentError(
                f"env {row} ({env}) is the same object as another env; each row needs its own "
                "env, so pass a callable that makes one"
            )
