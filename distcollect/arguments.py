"""Checks of what users hand to a collector, all made before any process is started."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import gymnasium as gym
import torch
from torch import nn

from .cluster import current
from .config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from .envs import check_env_id, is_env
from .errors import ArgumentError, ArgumentTypeError, PolicyNotSendable
from .spaces import leaves_of
from .updaters import WeightUpdaterBase

_PACKAGE = Path(__file__).parent


def positive(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse what is no whole number above zero.

    Raises:
        ArgumentError: it is zero, negative, or None and not ``optional``.
        ArgumentTypeError: it is no integer.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise ArgumentError(f"{name}={value}: must be at least 1")


def num_steps(frames_per_batch: int, num_workers: int, envs_per_worker: int) -> int:
    """T, the steps of each env in a batch.

    Raises:
        ArgumentError: the frames don't divide; says which numbers would.
    """
    rows = num_workers * envs_per_worker
    steps, rest = divmod(frames_per_batch, rows)
    if rest:
        lower, upper = steps * rows, (steps + 1) * rows
        would_do = f"{lower} or {upper} would do" if steps else f"{upper} would do"
        split = (
            f"{num_workers} worker(s) x {envs_per_worker} env(s)"
            if num_workers > 1
            else (f"{envs_per_worker} env(s)")
        )
        raise ArgumentError(
            f"frames_per_batch={frames_per_batch} can't be split evenly over {split}: {would_do}"
        )
    return steps


def total_batches(total_frames: int, frames_per_batch: int) -> int | None:
    """How many batches ``total_frames`` are; None: endless.

    A total that is no multiple is rounded up, with a warning.

    Raises:
        ArgumentError: it is neither positive nor -1.
    """
    if total_frames == -1:
        return None
    if isinstance(total_frames, bool) or not isinstance(total_frames, int):
        raise ArgumentTypeError(f"total_frames={total_frames!r}: must be a whole number")
    if total_frames < 1:
        raise ArgumentError(f"total_frames={total_frames}: must be at least 1, or -1 for endless")
    batches = -(-total_frames // frames_per_batch)
    if batches * frames_per_batch != total_frames:
        warnings.warn(
            f"total_frames={total_frames} is no multiple of frames_per_batch={frames_per_batch}: "
            f"{batches * frames_per_batch} frames will be collected",
            stacklevel=_users_level(),
        )
    return batches


def _users_level() -> int:
    """The ``stacklevel`` of a warning in the function that calls this, to point out of here."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def env_maker(maker: object, *, instances: bool) -> None:
    """Check what is to make an env, as far as that goes without making one.

    Args:
        maker: env id or callable; an env where ``instances`` are allowed.
        instances: whether an env itself will do.

    Raises:
        ArgumentError: unknown env id, an env where none will do, or spaces no batch can carry.
        ArgumentTypeError: nothing that makes an env.
    """
    if isinstance(maker, str):
        check_env_id(maker)
        try:
            env = gym.make(maker)
        except Exception as error:
            raise ArgumentError(
                f"the env {maker!r} can't be made here ({type(error).__name__}: {error}): install "
                "what it needs; if it is only to be made on workers' hosts, pass a callable that "
                "makes it"
            ) from error
        try:
            leaves_of(env.observation_space, "observation")
            leaves_of(env.action_space, "action")
        finally:
            env.close()
    elif is_env(maker):
        if not instances:
            raise ArgumentError(
                f"create_env_fn is an env ({maker}), which can't be sent to workers: pass a "
                "callable that makes one, e.g. lambda: gymnasium.make(...)"
            )
    elif not callable(maker):
        raise ArgumentTypeError(
            f"create_env_fn={maker!r}: must be an env id or a callable that makes an env"
        )


def env_makers(create_env_fn: object, num_workers: int) -> list[object]:
    """One maker for each worker, in the order of their ids.

    Raises:
        ArgumentError, ArgumentTypeError: as :func:`env_maker`, or a list of another length.
    """
    if isinstance(create_env_fn, list | tuple):
        if len(create_env_fn) != num_workers:
            raise ArgumentError(
                f"create_env_fn has {len(create_env_fn)} makers for {num_workers} worker(s): a "
                "list has one for each worker; use envs_per_worker for several envs in each"
            )
        makers = list(create_env_fn)
    else:
        makers = [create_env_fn]
    for maker in makers:
        env_maker(maker, instances=False)
    return makers if len(makers) > 1 else makers * num_workers


_SETTINGS: dict[str, type] = {
    "evaluation": EvaluationWorkers,
    "faults": Faults,
    "monitor": Monitor,
    "staleness": Staleness,
    "weight_sync": WeightSync,
}


def kinds(given: Mapping[str, object], flags: Set[str]) -> None:
    """Check what a collector is given for its settings and flags.

    Args:
        given: its arguments, by name.
        flags: those of them that are to be True, False, or None where they are optional.

    Raises:
        ArgumentTypeError: one is of another kind.
    """
    for name, value in given.items():
        kind = _SETTINGS.get(name)
        if kind is not None and value is not None and not isinstance(value, kind):
            raise ArgumentTypeError(
                f"{name}={value!r}: must be a distcollect.{kind.__name__}, as in "
                f"{name}=distcollect.{kind.__name__}(...)"
            )
        if name in flags and isinstance(value, str):
            raise ArgumentTypeError(f"{name}={value!r}: must be True or False")


def policy(given: object, factory: object) -> None:
    """Check the policy arguments.

    Raises:
        ArgumentError: both are given.
        ArgumentTypeError: one can't be called.
    """
    if given is not None and factory is not None:
        raise ArgumentError(
            f"policy={_short(given)} and policy_factory={_short(factory)} are both given: leave "
            "one out"
        )
    for name, value, wanted in (
        ("policy", given, "a module or function from observations to actions, or None: random"),
        ("policy_factory", factory, "a callable without parameters that makes the policy"),
    ):
        if value is not None and not callable(value):
            raise ArgumentTypeError(f"{name}={value!r}: must be {wanted}")


def _short(value: object) -> str:
    """It in a few words; a large module's repr has thousands of lines."""
    return str(getattr(value, "__name__", None) or f"{type(value).__name__}(...)")


class Devices(NamedTuple):
    """What is where; None: where it comes from."""

    storing: torch.device | None
    env: torch.device | None
    policy: torch.device | None


def devices(device: object, storing_device: object, env: object, policy: object) -> Devices:
    """A collector's devices: ``device`` for each of the others that is None.

    Raises:
        ArgumentError: torch knows no such device, or this process has none, and is the one that
            needs it.
    """
    # Workers of a launch may be on hosts that have what this one lacks.
    elsewhere = current() is not None

    def found(name: str, value: object, *, here: bool) -> torch.device | None:
        return _device("device", device, here) if value is None else _device(name, value, here)

    return Devices(
        found("storing_device", storing_device, here=True),
        found("env_device", env, here=not elsewhere),
        found("policy_device", policy, here=not elsewhere),
    )


def _device(name: str, value: object, here: bool) -> torch.device | None:
    if value is None:
        return None
    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name}={value!r}: {error}") from error
    if here and device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if (device.index or 0) >= num_gpus:
            raise ArgumentError(
                f"{name}={str(device)!r}: this process sees {num_gpus} GPU(s); name one of these, "
                "or 'cpu'"
            )
    return device


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


def models(given: object) -> dict[str, nn.Module]:
    """Check further modules.

    Raises:
        ArgumentTypeError: no dict of modules.
        ArgumentError: a name that can't be one.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(m, nn.Module) for m in given.values()):
        raise ArgumentTypeError(f"models={given!r}: must be a dict of names to modules")
    for name in given:
        if not isinstance(name, str) or not name or "." in name or name == "policy":
            raise ArgumentError(
                f"models: {name!r} can't be a module's name: it must be a string without dots, and "
                "'policy' is taken"
            )
    return dict(given)


def updater(given: object) -> WeightUpdaterBase | None:
    """Check a weight updater, or make it where what makes it is given.

    Raises:
        ArgumentTypeError: it is none.
    """
    if callable(given):
        given = given()
    if given is None or isinstance(given, WeightUpdaterBase):
        return given
    raise ArgumentTypeError(
        f"weight_updater={given!r}: must be derived from distcollect.WeightUpdaterBase"
    )


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


def devices_among(worker_ids: object) -> list[torch.device]:
    """The devices, where workers are selected by that; else none.

    Raises:
        ArgumentTypeError: devices and numbers are mixed.
    """
    each = worker_ids if isinstance(worker_ids, list | tuple) else [worker_ids]
    devices = [item for item in each if isinstance(item, torch.device)]
    if devices and len(devices) != len(each):
        raise ArgumentTypeError(f"worker_ids={worker_ids!r}: name workers or devices, not both")
    return devices


def worker_ids(wanted: object, present: Sequence[int]) -> list[int] | None:
    """The selected workers; None: all.

    Raises:
        ArgumentTypeError: neither an int nor a list of ints.
        ArgumentError: no such worker, none at all, or one twice.
    """
    if wanted is None:
        return None
    ids = [wanted] if isinstance(wanted, int) and not isinstance(wanted, bool) else wanted
    if isinstance(ids, slice):
        ids = list(present[ids])
    if not isinstance(ids, Sequence) or not all(
        isinstance(i, int) and not isinstance(i, bool) for i in ids
    ):
        raise ArgumentTypeError(f"worker_ids={wanted!r}: must be an int or a list of ints")
    unknown = [i for i in ids if i not in present]
    if unknown:
        raise ArgumentError(
            f"worker_ids={wanted!r}: no worker {unknown}; there are {list(present)}"
        )
    if not ids or len(set(ids)) != len(ids):
        raise ArgumentError(f"worker_ids={wanted!r}: name each worker once, and at least one")
    return list(ids)


def stragglers(
    preemptive_threshold: float | None, batch_deadline_s: float | None, *, sync: bool
) -> None:
    """Refuse what can't say for whom a batch doesn't wait.

    Raises:
        ArgumentError: it is out of bounds, or batches don't wait for anybody.
        ArgumentTypeError: it is no number.
    """
    for name, value, most in (
        ("preemptive_threshold", preemptive_threshold, 1.0),
        ("batch_deadline_s", batch_deadline_s, float("inf")),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name}={value!r}: must be a number")
        if not 0 < value <= most:
            bounds = "above 0" if most == float("inf") else "above 0 and at most 1"
            raise ArgumentError(f"{name}={value!r}: must be {bounds}")
        if not sync:
            raise ArgumentError(
                f"{name}={value!r} is for sync=True: without it nobody waits for the slowest"
            )


def num_collecting(num_workers: int, evaluation: EvaluationWorkers | None) -> int:
    """Workers that don't evaluate.

    Raises:
        ArgumentError: there are none.
    """
    num_evaluating = evaluation.num_workers if evaluation else 0
    if evaluation and num_evaluating >= num_workers:
        raise ArgumentError(
            f"EvaluationWorkers(num_workers={num_evaluating}): of {num_workers} worker(s), at "
            "least one has to collect"
        )
    return num_workers - num_evaluating
