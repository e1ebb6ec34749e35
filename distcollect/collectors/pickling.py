"""Pickles what workers are sent, and says which part can't be pickled."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
from torch import nn

from distcollect.errors import ArgumentError, PolicyNotSendable

_PACKAGE = Path(__file__).parent


def users_stack_level() -> int:
    """The ``stacklevel`` of a warning in the function that calls this, to point out of here."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def short_repr(value: object) -> str:
    """It in a few words; a large module's repr has thousands of lines."""
    return str(getattr(value, "__name__", None) or f"{type(value).__name__}(...)")


def pickled_plans(plan: Any, makers: Sequence[object]) -> dict[int, bytes]:
    """``plan`` with each worker's env maker, as it travels there: worker_id to bytes.

    Lambdas, closures and what is defined in ``__main__`` or a notebook travel by value.

    Raises:
        PolicyNotSendable: the policy can't be pickled.
        ArgumentError: an env maker, or something else in the plan, can't be.
    """
    payloads: dict[int, bytes] = {}
    for worker_id, maker in enumerate(makers):
        payloads[worker_id] = (
            payloads[0]
            if worker_id and maker is makers[0]
            else _pickled(replace(plan, create_env_fn=maker))
        )
    return payloads


def _pickled(plan: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(plan))
    except Exception as error:
        if _fails(plan.policy):
            raise PolicyNotSendable(
                f"the policy can't be sent to a worker ({type(error).__name__}: {error}); pass "
                "policy_factory, a callable that makes it there, instead"
            ) from error
        named = ("create_env_fn", "policy_factory", "models")
        what = next((name for name in named if _fails(getattr(plan, name))), "an argument")
        raise ArgumentError(
            f"{what} can't be sent to a worker ({type(error).__name__}: {error}); make what can't "
            "be pickled inside of it"
        ) from error


def _fails(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever it is, it is the answer
        return True
    return False


_Portable = TypeVar("_Portable")


def portable(given: _Portable) -> _Portable:
    """Policy and models in a form that a host without this one's GPU can unpickle.

    What they share they go on sharing.
    """
    modules = _modules_in(given)
    if not any(t.is_cuda for m in modules for t in (*m.parameters(), *m.buffers())):
        return given
    moved = copy.deepcopy(given)
    for module in _modules_in(moved):
        module.cpu()
    return moved


def _modules_in(given: Any) -> list[nn.Module]:
    user_policy, others = given
    modules = [user_policy] if isinstance(user_policy, nn.Module) else []
    return [*modules, *others.values()]
