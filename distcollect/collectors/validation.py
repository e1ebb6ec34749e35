"""Checks of what users hand to a collector, all made before any process is started."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from typing import NamedTuple

import gymnasium as gym
import torch
from torch import nn

from distcollect.collectors.pickling import (
    short_repr,
    users_stack_level,
)
from distcollect.config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from distcollect.envs.make import check_env_id, is_env
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.launch.worker_hosts import current
from distcollect.rollout.spaces import leaves_of
from distcollect.weights.updaters import WeightUpdaterBase


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
            stacklevel=users_stack_level(),
        )
    return batches


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
            f"policy={short_repr(given)} and policy_factory={short_repr(factory)} are both "
            "given: leave one out"
        )
    for name, value, wanted in (
        ("policy", given, "a module or function from observations to actions, or None: random"),
        ("policy_factory", factory, "a callable without parameters that makes the policy"),
    ):
        if value is not None and not callable(value):
            raise ArgumentTypeError(f"{name}={value!r}: must be {wanted}")


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
