"""Checks of a collector's arguments; all are made before any process is started."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeGuard

import gymnasium as gym
import torch
from torch import nn

from distcollect.collectors import pickling
from distcollect.collectors.replay import num_dims
from distcollect.collectors.stacklevel import users_stack_level
from distcollect.common import checks
from distcollect.config import EvaluationWorkers, Faults, Monitor, Staleness, WeightSync
from distcollect.envs.kinds import is_env
from distcollect.envs.make import check_env_id, make_by_id, space_of
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.launch.open_hosts import current
from distcollect.policy.weight_layout import WeightLayout, module_of
from distcollect.rollout.spaces import leaves_of


def num_steps(
    frames_per_batch: int, num_rollouts: int, num_envs: int, *, rounds_up: bool = False
) -> int:
    """T, the number of steps of each env in a batch of rollouts ``[num_envs, T]``.

    Args:
        frames_per_batch: as the user gave it.
        num_rollouts: number of rollouts in a batch.
        num_envs: number of envs in a rollout.
        rounds_up: warn and round up, instead of raising an error.

    Raises:
        ArgumentError: ``frames_per_batch`` is no multiple of the rows; names the nearest multiples.
    """
    rows = num_rollouts * num_envs
    steps, rest = divmod(frames_per_batch, rows)
    if rest and rounds_up:
        steps += 1
        warnings.warn(
            f"frames_per_batch={frames_per_batch} is no multiple of {rows}, the number of envs: a "
            f"batch has {steps * rows} frames",
            stacklevel=users_stack_level(),
        )
    elif rest:
        lower, upper = steps * rows, (steps + 1) * rows
        would_do = f"{lower} or {upper} would do" if steps else f"{upper} would do"
        workers = f"{num_rollouts} worker(s) x " if num_rollouts > 1 else ""
        raise ArgumentError(
            f"frames_per_batch={frames_per_batch} can't be split evenly over "
            f"{workers}{num_envs} env(s): {would_do}"
        )
    return steps


def check_total_frames(total_frames: int, frames_per_batch: int) -> None:
    """Check ``total_frames``; warn if it is no multiple, as it is rounded up then.

    Raises:
        ArgumentError: it is neither positive nor -1.
        ArgumentTypeError: it is not an int.
    """
    if total_frames == -1:
        return
    if isinstance(total_frames, bool) or not isinstance(total_frames, int):
        raise ArgumentTypeError(f"total_frames={total_frames!r}: must be a whole number")
    if total_frames < 1:
        raise ArgumentError(f"total_frames={total_frames}: must be at least 1, or -1 for endless")
    if total_frames % frames_per_batch:
        rounded = -(-total_frames // frames_per_batch) * frames_per_batch
        warnings.warn(
            f"total_frames={total_frames} is no multiple of frames_per_batch={frames_per_batch}: "
            f"{rounded} frames will be collected",
            stacklevel=users_stack_level(),
        )


def may_make_torchrl_envs(makers: Sequence[object]) -> bool:
    """Whether the makers are, or may make, TorchRL's envs; it is not known before they are called.

    Without TorchRL in this process, or for a class or env of Gymnasium, they can't.
    """
    return "torchrl.envs" in sys.modules and not any(
        isinstance(maker, str | gym.Env | gym.vector.VectorEnv)
        or (isinstance(maker, type) and issubclass(maker, gym.Env | gym.vector.VectorEnv))
        for maker in makers
    )


def check_env_maker(maker: object, *, instances: bool) -> None:
    """Check one env maker. Only the env of a known id is made for this, and closed again.

    Args:
        maker: env id or callable; with ``instances`` also an env.
        instances: whether an env itself is accepted.

    Raises:
        ArgumentError: the env id is unknown, an env is not accepted here, or a batch can't hold the
            env's spaces.
        ArgumentTypeError: it can't make an env.
    """
    if isinstance(maker, str):
        check_env_id(maker)
        try:
            env = make_by_id(maker)
        except Exception as error:
            raise ArgumentError(
                f"the env {maker!r} can't be made here ({type(error).__name__}: {error}): install "
                "what it needs; if only the workers' hosts can make it, pass a callable that makes "
                "it"
            ) from error
        try:
            for role in ("observation", "action"):
                leaves_of(space_of(env, role), role)
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
    """One maker for each worker, in the order of worker_id.

    Raises:
        ArgumentError, ArgumentTypeError: as :func:`check_env_maker`, or a list has another length.
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
    makers = pickling.with_copied_envs(makers)
    for maker in makers:
        check_env_maker(maker, instances=False)
    return makers if len(makers) > 1 else makers * num_workers


_SETTINGS: dict[str, type] = {
    "evaluation": EvaluationWorkers,
    "faults": Faults,
    "monitor": Monitor,
    "staleness": Staleness,
    "weight_sync": WeightSync,
}


def check_kinds(options: Any) -> None:
    """Check that settings and flags have the right type.

    Args:
        options: a dataclass of a collector's arguments.

    Raises:
        ArgumentTypeError: one has another type; says which it must have.
    """
    for argument in fields(options):
        name, value = argument.name, getattr(options, argument.name)
        kind = _SETTINGS.get(name)
        if kind is not None and value is not None and not isinstance(value, kind):
            raise ArgumentTypeError(
                f"{name}={value!r}: must be a distcollect.{kind.__name__}, as in "
                f"{name}=distcollect.{kind.__name__}(...)"
            )
        if str(argument.type).startswith("bool") and isinstance(value, str):
            raise ArgumentTypeError(f"{name}={value!r}: must be True or False")


def check_random_frames(value: object) -> None:
    """Check ``init_random_frames``.

    Raises:
        ArgumentError: it is neither None nor a whole number, 0 or more.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ArgumentError(f"init_random_frames={value!r}: must be a whole number, 0 or more")


def check_policy(policy: object, factory: object, *, several: bool) -> None:
    """Check ``policy`` and ``policy_factory``; ``several``: a list of factories is allowed.

    Raises:
        ArgumentTypeError: one can't be called.
        ArgumentError: workers can't copy the weights of ``policy``, as these have no shape yet.
    """
    factories = factory if several and isinstance(factory, list | tuple) and factory else [factory]
    wanted = "a callable without parameters that makes the policy"
    for name, value, wanted in (
        ("policy", policy, "a module or function from observations to actions, or None: random"),
        *(("policy_factory", each, wanted) for each in factories),
    ):
        if value is not None and not callable(value):
            raise ArgumentTypeError(f"{name}={value!r}: must be {wanted}")
    if several:
        WeightLayout.of(module_of(policy))  # else each worker would draw its own weights


def is_by_worker(weights: object) -> TypeGuard[dict[int, Any]]:
    """Whether it is a dict with the weights of each of several workers, by worker_id."""
    return (
        isinstance(weights, dict)
        and bool(weights)
        and all(type(checks.plain(key)) is int for key in weights)
    )


def check_hooks(options: Any) -> None:
    """Check the functions that are called before and after each rollout.

    Raises:
        ArgumentTypeError: one can't be called.
    """
    for name in ("pre_collect_hook", "post_collect_hook", "init_fn"):
        check_hook(name, getattr(options, name, None))


def check_hook(name: str, value: object) -> None:
    """Check one function that is called before or after something.

    Raises:
        ArgumentTypeError: it can't be called.
    """
    if value is not None and not callable(value):
        raise ArgumentTypeError(f"{name}={value!r}: must be a function")


def check_buffer_takes(options: Any) -> None:
    """Check that the replay buffer can take what it is to be given.

    Raises:
        ArgumentError: it takes single steps or whole rollouts of several envs (``extend_buffer`` is
            False, or ``ndim`` above 1), and a batch is changed as a whole, or frames are left out.
    """
    ndim = num_dims(options.replay_buffer)
    if options.replay_buffer is None or (options.extend_buffer and ndim == 1):
        return
    conflicts = {
        "preemptive_threshold": "leaves out frames",
        "batch_deadline_s": "leaves out frames",
        "mask_above": "leaves out frames",
        "split_trajs": "needs whole batches",
        "trajs_per_batch": "needs whole batches",
    }
    if ndim == 1:
        conflicts["postproc"] = "needs whole batches"
    for name, reason in conflicts.items():
        value = getattr(options, name, None)
        if value is None or value is False:
            continue
        given = options.staleness if name == "mask_above" else name
        if ndim == 1:
            raise ArgumentError(
                "extend_buffer=False adds single steps to the replay buffer, and "
                f"{given} {reason}: leave out one of them"
            )
        raise ArgumentError(
            f"replay_buffer: its storage has ndim={ndim}, so it takes whole rollouts, and "
            f"{given} {reason}: use a storage with ndim=1, or leave out the other"
        )


def check_traj_format(value: object, trajs_per_batch: int | None) -> None:
    """Check ``traj_format``.

    Raises:
        ArgumentError: it is neither None, "padded" nor "cat", or "cat" without ``trajs_per_batch``.
    """
    if value not in (None, "padded", "cat"):
        raise ArgumentError(f"traj_format={value!r}: must be 'padded' or 'cat'")
    if value == "cat" and trajs_per_batch is None:
        raise ArgumentError("traj_format='cat' is for batches of trajectories: add trajs_per_batch")


class Devices(NamedTuple):
    """A collector's devices; None: no choice was made.

    Attributes:
        storing: where batches are delivered.
        env: where TorchRL envs compute.
        policy: where the policy computes.
    """

    storing: torch.device | None
    env: torch.device | None
    policy: torch.device | None


def worker_devices(
    device: object,
    storing_device: object,
    env: object,
    policy: object,
    num_workers: int,
    *,
    elsewhere: bool = False,
) -> list[Devices]:
    """The devices of each worker, from single devices or lists of one for each worker.

    Raises:
        ArgumentError: as :func:`devices`; a list has another length; or batches would have to be
            delivered on several devices.
    """
    given = {
        "device": device, "storing_device": storing_device, "env_device": env,
        "policy_device": policy,
    }  # fmt: skip
    for name, value in given.items():
        if isinstance(value, list | tuple) and len(value) != num_workers:
            raise ArgumentError(
                f"{name}={value!r}: a list has one device for each worker, and there are "
                f"{num_workers}"
            )
    found = [
        devices(
            *(v[w] if isinstance(v, list | tuple) else v for v in given.values()),
            elsewhere=elsewhere,
        )
        for w in range(num_workers)
    ]
    if len({each.storing for each in found}) > 1:
        raise ArgumentError(
            f"storing_device={storing_device!r}, device={device!r}: the frames of all workers have "
            "the same device in a batch: give one storing_device"
        )
    return found


def devices(
    device: object,
    storing_device: object,
    env: object,
    policy: object,
    *,
    elsewhere: bool = False,
) -> Devices:
    """A collector's devices; ``device`` replaces each of the others that is None.

    ``elsewhere``: the envs and policies are on other hosts, which may have devices that this one
    lacks.

    Raises:
        ArgumentError: torch knows no such device, or this process needs it and doesn't have it.
    """
    elsewhere = elsewhere or current() is not None

    def found(name: str, value: object, *, here: bool) -> torch.device | None:
        return _device("device", device, here) if value is None else _device(name, value, here)

    chosen = Devices(
        found("storing_device", storing_device, here=True),
        found("env_device", env, here=not elsewhere),
        found("policy_device", policy, here=not elsewhere),
    )
    # Batches are on the CPU in any case: here they say so, as TorchRL's do.
    cpu = torch.device("cpu")
    computes_on_cpu = chosen.env == chosen.policy == cpu
    return chosen._replace(storing=cpu) if chosen.storing is None and computes_on_cpu else chosen


def _device(name: str, value: object, here: bool) -> torch.device | None:
    if isinstance(value, list | tuple):
        value = _same_device(name, value)
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


def _same_device(name: str, values: Sequence[object]) -> object:
    """The device of all workers, from a list with one for each worker."""
    if not values or len({str(value) for value in values}) != 1:
        raise ArgumentError(
            f"{name}={values!r}: all workers have the same device here: give one device. If their "
            "policies are to compute on different ones, choose it in policy_factory"
        )
    return values[0]


def named_models(given: object) -> dict[str, nn.Module]:
    """``models`` as a dict; empty for None.

    Raises:
        ArgumentTypeError: it is not a dict of modules.
        ArgumentError: a name is not allowed.
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


def check_stragglers(
    preemptive_threshold: float | None, batch_deadline_s: float | None, *, sync: bool
) -> None:
    """Check the limits after which a batch is delivered without the slowest workers.

    Raises:
        ArgumentError: a limit is out of bounds, or it is given in async mode.
        ArgumentTypeError: a limit is not a number.
    """
    for name, value, most in (
        ("preemptive_threshold", preemptive_threshold, 1.0),
        ("batch_deadline_s", batch_deadline_s, float("inf")),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name}={value!r}: must be a number")
        is_share = most == 1.0
        if not (value >= 0 if is_share else value > 0) or value > most:
            bounds = "at least 0 and at most 1" if is_share else "above 0"
            raise ArgumentError(f"{name}={value!r}: must be {bounds}")
        if not sync:
            raise ArgumentError(
                f"{name}={value!r} is for sync=True: without it no batch waits for a slow worker"
            )


def num_collecting(num_workers: int, evaluation: EvaluationWorkers | None) -> int:
    """Number of workers that don't evaluate.

    Raises:
        ArgumentError: it would be 0.
    """
    num_evaluating = evaluation.num_workers if evaluation else 0
    if evaluation and num_evaluating >= num_workers:
        raise ArgumentError(
            f"EvaluationWorkers(num_workers={num_evaluating}): of {num_workers} worker(s), at "
            "least one has to collect"
        )
    return num_workers - num_evaluating
