"""Pickles the plans that workers get; an error says which part can't be pickled."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from distcollect.common.by_value import dumps
from distcollect.engine.pickled_plan import (
    PickledPlan,
    PicklerWithout,
    TensorTable,
    UnpicklerWith,
)
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.kinds import kind_of
from distcollect.envs.make import EnvContext
from distcollect.envs.registered import pickled_registry
from distcollect.errors import ArgumentError, DistCollectError, PolicyNotSendable
from distcollect.policy.weight_layout import module_of


class EnvCopies:
    """An env maker that makes copies of one TorchRL env, in any process.

    The first copy has the state that the env had, with its random generator. All others have seeds
    of their own: else they would play the same episodes.
    """

    def __init__(self, env: object, worker_id: int) -> None:
        """Pickle ``env``; the worker gets the first copy.

        Raises:
            ArgumentError: it can't be pickled.
        """
        self._kind = type(env).__name__
        self._first = worker_id, 0  # with the incarnation
        self._is_used = False  # in this process
        try:
            self._pickled = dumps(env)
        except Exception as error:
            advice = _advice(error, "pass a callable that makes one")
            raise ArgumentError(
                f"create_env_fn is an env ({self._kind}) that can't be sent to workers "
                f"({type(error).__name__}: {error}): {advice}"
            ) from error

    def __call__(self, context: EnvContext) -> Any:
        """A copy of the env."""
        env = pickle.loads(self._pickled)
        if self._is_used or (context.worker_id, context.incarnation) != self._first:
            env.set_seed(int(np.random.SeedSequence().generate_state(1)[0]) >> 1)
        self._is_used = True
        return env

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_used": False}  # in another process

    def __repr__(self) -> str:
        return f"copies of a {self._kind}"


def with_copied_envs(makers: Sequence[object]) -> list[object]:
    """``makers``, with a maker of copies in place of each TorchRL env; the same for the same env.

    Args:
        makers: by worker_id, or one for all workers.

    Raises:
        ArgumentError: an env can't be pickled.
    """
    copies: dict[int, EnvCopies] = {}
    for worker_id, maker in enumerate(makers):
        kind = kind_of(maker)
        if kind is not None and kind.can_be_copied and id(maker) not in copies:
            copies[id(maker)] = EnvCopies(maker, worker_id)
    return [copies.get(id(maker), maker) for maker in makers]


def pickled_hooks(*hooks: object) -> bytes:
    """Functions that workers call before and after a rollout, pickled.

    Raises:
        ArgumentError: one can't be pickled.
    """
    try:
        return dumps(hooks)
    except Exception as error:
        raise ArgumentError(
            f"the hook can't be sent to workers ({type(error).__name__}: {error}): use a function "
            "that refers to nothing that can't be pickled"
        ) from error


def pickled_plans(plans: Sequence[WorkerPlan]) -> list[PickledPlan]:
    """The plans of all workers, pickled; makers of envs, factories and devices may differ.

    The tensors of policy and models are pickled once, and so are plans that are equal. Lambdas,
    closures and what is defined in ``__main__`` or a notebook travel by value.

    Raises:
        PolicyNotSendable: the policy can't be pickled.
        ArgumentError: an env maker, or something else in a plan, can't be pickled; or the policy is
            on several devices, and a plan does not name one.
    """
    policy, models = plans[0].policy, plans[0].models
    makers = [plan.create_env_fn for plan in plans]
    registry = pickled_registry([maker for maker in makers if isinstance(maker, str)])
    held = module_of(policy)
    default = home(policy, models) if any(plan.device is None for plan in plans) else None
    pickled: dict[tuple[object, ...], PickledPlan] = {}
    found: list[PickledPlan] = []
    plan = plans[0]
    try:
        table = TensorTable(_tensors(policy, models))
        for plan in plans:
            device = plan.device or default
            # Objects by identity: they may have no hash.
            differing = id(plan.create_env_fn), id(plan.policy_factory), device, plan.env_device
            if differing not in pickled:
                whole = replace(plan, device=device, registry=registry, held=held)
                pickled[differing] = table.pickled(whole)
            found.append(pickled[differing])
    except Exception as error:
        raise _not_sendable(plan, error) from error
    return found


def home(policy: Any, models: Mapping[str, nn.Module]) -> torch.device | None:
    """The kind of device where policy and models are, for workers to use; None: the CPU.

    Raises:
        ArgumentError: they are on devices of several kinds, on several GPUs, or on "meta".
    """
    devices = {tensor.device for tensor in _tensors(policy, models)} or {torch.device("cpu")}
    if devices == {torch.device("cpu")}:
        return None
    if len(devices) > 1 or torch.device("meta") in devices:
        found = ", ".join(sorted(map(str, devices)))
        raise ArgumentError(
            f"policy: its weights, with those of models, are on {found}; move them to one device "
            "that holds values, or name the workers' by policy_device='cpu' or 'cuda'"
        )
    # A worker's host may number its GPUs in another way.
    return torch.device(devices.pop().type)


def _not_sendable(plan: WorkerPlan, error: Exception) -> DistCollectError:
    """The error that names the part of ``plan`` which can't be pickled."""
    if _fails(plan.policy):
        return PolicyNotSendable(
            f"the policy can't be sent to a worker ({type(error).__name__}: {error}); pass "
            "policy_factory, a callable that makes it there, instead"
        )
    names = ("create_env_fn", "policy_factory", "models")
    what = next((name for name in names if _fails(getattr(plan, name))), "an argument")
    return ArgumentError(
        f"{what} can't be sent to a worker ({type(error).__name__}: {error}): "
        + _advice(error, "create what can't be pickled inside of it")
    )


def _advice(error: Exception, usual: str) -> str:
    """Say what to do about something that can't be pickled; ``usual`` unless processes share it."""
    if "through inheritance" not in str(error):
        return usual
    return (
        "it holds a lock or a number that processes share, as a TorchRL EnvCreator does for "
        "VecNorm, VecNormV2 and TrajCounter, and workers share nothing: pass the function that "
        "makes the env instead of the EnvCreator, and each worker has statistics or counts of its "
        "own; or share them within SyncDataCollector(ParallelEnv(n, EnvCreator(...)), ...)"
    )


def _fails(value: object) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - any failure is the answer
        return True
    return False


def copied(policy: Any, models: Mapping[str, nn.Module]) -> tuple[Any, Mapping[str, nn.Module]]:
    """Policy and models that share no weight with the given ones.

    Raises:
        ArgumentError: they can't be copied.
    """
    reason: object = (
        "it is a function of a module that can be imported, or its class has or uses the weights, "
        "and so they are never copied"
    )
    classes: list[type] = []

    def kept(value: object) -> int | None:
        """Leave classes out: of one of a script, cloudpickle would replace the attributes."""
        if not isinstance(value, type):
            return None
        classes.append(value)
        return len(classes) - 1

    def pickled_and_back(given: Any) -> Any:
        file = io.BytesIO()
        PicklerWithout(file, kept).dump(given)
        file.seek(0)
        return UnpicklerWith(file, classes).load()

    own = {id(tensor) for tensor in _tensors(policy, models)}
    # A deep copy of a function is the function itself, with the variables of its closure. And a
    # parametrized module can't be pickled.
    for duplicate in (copy.deepcopy, pickled_and_back):
        try:
            copies: tuple[Any, Mapping[str, nn.Module]] = duplicate((policy, models))
        except Exception as error:  # noqa: BLE001 - the next way, or the reason below
            reason = f"{type(error).__name__}: {error}"
            continue
        if own.isdisjoint(id(tensor) for tensor in _tensors(*copies)):
            return copies
    raise ArgumentError(
        f"start(): the policy and its weights can't be copied for the background ({reason}): pass "
        "a module, or a method of one"
    )


def _tensors(policy: Any, models: Mapping[str, nn.Module]) -> Iterator[torch.Tensor]:
    for module in (module_of(policy), *models.values()):
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()
