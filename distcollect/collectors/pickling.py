"""Pickles the plans that workers get; an error says which part can't be pickled."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
from torch import nn

from distcollect.engine.plan import WorkerPlan
from distcollect.envs.registered import pickled_registry
from distcollect.errors import ArgumentError, PolicyNotSendable


def short_repr(value: object) -> str:
    """A short name for ``value``: the repr of a large module has thousands of lines."""
    return str(getattr(value, "__name__", None) or f"{type(value).__name__}(...)")


def pickled_plans(plan: WorkerPlan, makers: Sequence[object]) -> list[bytes]:
    """``plan`` with the env maker of each worker, pickled; one for each maker.

    Lambdas, closures and what is defined in ``__main__`` or a notebook travel by value.

    Raises:
        PolicyNotSendable: the policy can't be pickled.
        ArgumentError: an env maker, or something else in the plan, can't be pickled.
    """
    policy, models = _on_cpu(plan.policy, plan.models)
    registry = pickled_registry([maker for maker in makers if isinstance(maker, str)])
    plan = replace(plan, policy=policy, models=models, registry=registry)
    payloads: list[bytes] = []
    for maker in makers:
        is_same = bool(payloads) and maker is makers[0]
        payloads.append(payloads[0] if is_same else _pickled(replace(plan, create_env_fn=maker)))
    return payloads


def _pickled(plan: WorkerPlan) -> bytes:
    try:
        return bytes(cloudpickle.dumps(plan))
    except Exception as error:
        if _fails(plan.policy):
            raise PolicyNotSendable(
                f"the policy can't be sent to a worker ({type(error).__name__}: {error}); pass "
                "policy_factory, a callable that makes it there, instead"
            ) from error
        named = {
            "create_env_fn": plan.create_env_fn,
            "policy_factory": plan.policy_factory,
            "models": plan.models,
        }
        what = next((name for name, value in named.items() if _fails(value)), "an argument")
        raise ArgumentError(
            f"{what} can't be sent to a worker ({type(error).__name__}: {error}); create what "
            "can't be pickled inside of it"
        ) from error


def _fails(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - any failure is the answer
        return True
    return False


def _on_cpu(policy: Any, models: Mapping[str, nn.Module]) -> tuple[Any, Mapping[str, nn.Module]]:
    """Policy and models such that a host without this host's GPU can unpickle them.

    Submodules that policy and models share remain shared.
    """
    if not any(
        t.is_cuda for m in _modules(policy, models) for t in (*m.parameters(), *m.buffers())
    ):
        return policy, models
    policy, models = copy.deepcopy((policy, models))
    for module in _modules(policy, models):
        module.cpu()
    return policy, models


def _modules(policy: Any, models: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [*([policy] if isinstance(policy, nn.Module) else []), *models.values()]
