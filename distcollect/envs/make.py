"""Makes a batch of envs from what the user passes as ``create_env_fn``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium.envs.registration import find_highest_version, parse_env_id

from distcollect.common.refusing import refusing
from distcollect.common.tables import counted
from distcollect.envs.base import Envs, InfoKeys, Maker, Remaker, describe
from distcollect.envs.closing import close
from distcollect.envs.kinds import EnvKind, is_env, kind_of
from distcollect.envs.vector_ids import VectorMaker, vector_maker
from distcollect.errors import ArgumentError, ArgumentTypeError, EnvError, users_errors


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
        problem = f"no env {env_id!r}: importing the module {module!r} failed"
        remedy = "the part before the colon of 'module:id' must be a module that can be imported"
        with refusing(problem, remedy, Exception):
            importlib.import_module(module)
    remedy = "if a module has to be imported to register the env, write 'module:id'"
    with refusing(f"no env {env_id!r}", remedy, gym.error.Error):
        namespace, base, version = parse_env_id(name)
        if version is None and find_highest_version(namespace, base) is not None:
            return
        gym.spec(name)


def make_by_id(env_id: str) -> Any:
    """Make the env of an id; with a single row if the id is one of a vector env."""
    vector = vector_maker(env_id)
    return gym.make(env_id) if vector is None else vector()


def first_env_maker(maker: Any) -> Callable[[], Any]:
    """Return what makes, without arguments, the first env of an id or of a callable."""
    if isinstance(maker, str):
        return partial(make_by_id, maker)
    context = EnvContext(worker_id=0, env_index=0, incarnation=0, seed=None)
    return partial(maker, context=context) if _takes_context(maker) else maker


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
    given: Any = vector_maker(create_env, num_envs) or create_env
    is_list = isinstance(given, list | tuple)
    makers: list[Any] = list(given) if is_list else [given] * num_envs
    if len(makers) != num_envs:
        raise ArgumentError(
            f"the list has {counted(len(makers), 'env')}, but {num_envs} are needed: list as many"
        )
    envs: list[Any] = []
    opened: list[Any] = []
    remakers: list[Remaker] = []
    try:
        for row, (maker, context) in enumerate(zip(makers, contexts, strict=True)):
            make = partial(_make, maker, row, context, device)
            env = make()
            if is_env(maker):
                remakers.append(None)
            else:
                opened.append(env)
                remakers.append(maker if isinstance(maker, VectorMaker) else make)
            envs.append(env)
            if _steps_all_rows(envs, num_envs, is_list=is_list):
                break
        return _kind_of_all(envs).batch(envs, info_keys, remakers)
    except BaseException:
        for env in opened:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                close(env)
        raise


def _steps_all_rows(envs: Sequence[Any], num_envs: int, *, is_list: bool) -> bool:
    """Return True if the env that was made last needs no others beside it.

    Raises:
        ArgumentError: it can't be used with the others, or has another number of rows.
    """
    *others, env = envs
    if any(env is other for other in others):
        raise ArgumentError(
            f"env {len(others)} ({env}) is the same object as another env; each row needs its own "
            "env, so pass a callable that makes one"
        )
    num_rows = _kind_of(env).num_rows(env)
    if num_rows is None:
        return False
    if is_list or others:
        raise ArgumentError(
            f"{env} is a vector env, but a list must contain single envs: pass it without a list"
        )
    if num_envs not in (1, num_rows):
        raise ArgumentError(
            f"{env} has {counted(num_rows, 'env')}, but {num_envs} are asked for: ask for "
            f"{num_rows}, or for 1 to use it as it is"
        )
    return True


def _kind_of_all(envs: Sequence[Any]) -> EnvKind:
    """Return the one kind of all envs."""
    kind, *others = {_kind_of(env): None for env in envs}
    if others:
        library = next(each.library for each in (kind, *others) if each.library != EnvKind.library)
        raise ArgumentError(
            f"a list can't mix {library} envs and others: use envs of one kind, for example "
            "TorchRL's GymEnv for those of Gymnasium"
        )
    return kind


def _make(maker: Any, row: int, context: EnvContext, device: torch.device | None) -> Any:
    # First look for an env: it may be callable, too.
    env: Any = maker if is_env(maker) else _call_maker(maker, row, context)
    return _kind_of(env).prepared(env, device)


def _kind_of(env: object) -> EnvKind:
    kind = kind_of(env)
    assert kind is not None
    return kind


def _call_maker(maker: Any, row: int, context: EnvContext) -> Any:
    if isinstance(maker, str):
        check_env_id(maker)
        name, make = f"gymnasium.make({maker!r})", partial(make_by_id, maker)
    elif callable(maker):
        name = f"{getattr(maker, '__qualname__', type(maker).__name__)}()"
        if isinstance(maker, VectorMaker):
            maker.check()
            name = maker.env_id
        make = partial(maker, context=context) if _takes_context(maker) else maker
    else:
        raise ArgumentTypeError(
            "create_env_fn must be an env id, a callable, an env, a vector env, or a list of "
            f"these, not {type(maker).__name__}"
        )
    try:
        env = make()
    except users_errors() as err:
        raise EnvError(f"env {row}: {name} raised {describe(err)}{_unbound(make)}") from err
    if not is_env(env):
        kind = f"{type(env).__module__}.{type(env).__qualname__}"
        raise EnvError(
            f"env {row}: {name} returned a {kind}; it must return a gymnasium Env or VectorEnv, "
            "a TorchRL EnvBase or a PettingZoo ParallelEnv (of an AECEnv, "
            "pettingzoo.utils.aec_to_parallel makes one)"
        )
    return env


def _unbound(make: Callable[..., Any]) -> str:
    """What to say of a maker that asks for arguments that it doesn't get."""
    try:
        inspect.signature(make).bind()
    except ValueError:  # some builtins have no signature
        return ""
    except TypeError:
        return (
            ": only a parameter named context gets something, an EnvContext with the env's number"
        )
    return ""


def _takes_context(maker: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(maker).parameters.get("context")
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )
