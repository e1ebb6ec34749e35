"""Checks of a collector's arguments; all are made before any process is started."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn

from distcollect import config
from distcollect.collectors import pickling
from distcollect.collectors.replay import ReplayBuffer, num_dims
from distcollect.collectors.user_code import users_stack_level
from distcollect.common import checks
from distcollect.common.tables import counted
from distcollect.envs.base import space_of
from distcollect.envs.kinds import is_env
from distcollect.envs.make import check_env_id, make_by_id
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.launch.open_hosts import current
from distcollect.policy.weight_layout import WeightLayout, module_of, published, state_tensors
from distcollect.rollout.spaces import leaves_of


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]
# Of arguments that are not None: what they must be, and how errors say that.
_TYPES: _Rules = {
    "policy": (callable, "a module or function from observations to actions, or None: random"),
    "postproc": (callable, "a callable that takes a batch and returns one"),
    "pre_collect_hook": (callable, "a function"),
    "post_collect_hook": (callable, "a function"),
    "init_fn": (callable, "a function"),
    "info_keys": (
        lambda value: not isinstance(value, str),
        "a list of names, such as ['success'], or a dict from names to spaces",
    ),
    "replay_buffer": (
        lambda value: (
            isinstance(value, ReplayBuffer) and not isinstance(value, MutableSequence | type)
        ),
        "an object with a method extend(frames) for a TensorDict [F], as TorchRL's buffers are",
    ),
    "total_frames": (_is_whole, "a whole number"),
    "preemptive_threshold": (_is_number, "a number"),
    "batch_deadline_s": (_is_number, "a number"),
}
_VALUES: _Rules = {
    "create_env_fn": (
        lambda value: not isinstance(value, list | tuple) or len(value) > 0,
        "an env id or a callable that makes an env, or a list with at least one",
    ),
    "total_frames": (lambda value: value == -1 or value > 0, "at least 1, or -1 for endless"),
    "init_random_frames": (lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "worker_idx": (lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more"),
    "preemptive_threshold": (lambda value: 0 <= value <= 1, "at least 0 and at most 1"),
    "batch_deadline_s": (lambda value: value > 0, "above 0"),
    "cat_results": (lambda v: v == "stack" or (_is_whole(v) and v in (0, -1)), "0, -1 or 'stack'"),
    "traj_format": (lambda value: value in ("padded", "cat"), "'padded' or 'cat'"),
}


def check_each(options: Any) -> None:
    """Check the type and the bounds of each argument by itself.

    Args:
        options: a dataclass of a collector's arguments.

    Raises:
        ArgumentError, ArgumentTypeError: one is wrong; says what it must be.
    """
    for argument in fields(options):
        name, value = argument.name, getattr(options, argument.name)
        kind, *others = str(argument.type).split(" | ")
        settings = getattr(config, kind, None)  # which check themselves
        if kind == "bool" and isinstance(value, str):
            raise ArgumentTypeError(f"{name}={value!r}: must be True or False")
        if kind == "int" and name not in _VALUES:
            checks.positive(name, value, optional="None" in others)
        if settings is not None and value is not None and not isinstance(value, settings):
            wanted = f"distcollect.{kind}"
            raise ArgumentTypeError(f"{name}={value!r}: must be a {wanted}, as in {wanted}(...)")
        check_one(name, value)


def check_one(name: str, value: Any) -> None:
    """Check one argument; None is not checked."""
    for rules, error in ((_TYPES, ArgumentTypeError), (_VALUES, ArgumentError)):
        allows, wanted = rules.get(name, (None, ""))
        if value is not None and allows is not None and not allows(value):
            raise error(f"{name}={value!r}: must be {wanted}")


def check_together(options: Any) -> None:
    """Check arguments of every collector that have to fit each other.

    Raises:
        ArgumentError: they contradict each other; says what to leave out.
    """
    whole = options.trajs_per_batch is not None
    if options.traj_format == "cat" and not whole:
        raise ArgumentError("traj_format='cat' is for batches of trajectories: add trajs_per_batch")
    if whole and options.set_truncated:
        raise ArgumentError(
            "set_truncated ends trajectories at the end of each row, and trajs_per_batch asks "
            "for whole trajectories: drop one of them"
        )
    if whole and options.split_trajs:
        raise ArgumentError(
            "split_trajs and trajs_per_batch are both given: the latter gives one row for each "
            "trajectory already"
        )
    if whole and (bound := getattr(options, "staleness", None)) is not None:
        raise ArgumentError(
            f"trajs_per_batch={options.trajs_per_batch} and {bound}: a trajectory spans rollouts, "
            "and its first frames get older until it ends: leave one of them out"
        )
    _check_buffer_takes(options)


def num_steps(options: Any, num_envs: int, *, rounds_up: bool = False) -> int:
    """T, the number of steps of each env in a batch of rollouts ``[num_envs, T]``.

    Args:
        options: a collector's arguments.
        num_envs: number of envs in a rollout.
        rounds_up: warn and round up, instead of raising an error.

    Raises:
        ArgumentError: ``frames_per_batch`` is no multiple of the rows; names the nearest multiples.
    """
    frames_per_batch: int = options.frames_per_batch
    num_rollouts: int = options.rollouts_per_batch
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
                f"create_env_fn has {counted(len(create_env_fn), 'maker')} for "
                f"{counted(num_workers, 'worker')}: a list has one for each worker; use "
                "envs_per_worker for several envs in each"
            )
        makers = list(create_env_fn)
    else:
        makers = [create_env_fn]
    makers = pickling.with_copied_envs(makers)
    for maker in makers:
        check_env_maker(maker, instances=False)
    return makers if len(makers) > 1 else makers * num_workers


def check_policy(policy: object, factories: object, *, several: bool) -> None:
    """Check ``policy_factory``, and with workers that they can copy the weights of ``policy``.

    Args:
        policy: the policy.
        factories: the callable that makes it, or with ``several`` a list of them; or None.
        several: the policy is for workers.

    Raises:
        ArgumentTypeError: a factory can't be called, or ``policy`` is a class.
        ArgumentError: the weights of ``policy`` have no shape yet.
    """
    if isinstance(policy, type):
        name = policy.__name__
        raise ArgumentTypeError(
            f"policy={name} is a class: pass an object, {name}(...), or policy_factory={name}"
        )
    is_list = several and isinstance(factories, list | tuple)
    for each in factories if is_list and factories else [factories]:  # type: ignore[attr-defined]
        if each is not None and not callable(each):
            raise ArgumentTypeError(
                f"policy_factory={each!r}: must be a callable without parameters that makes the "
                "policy"
            )
    if several:
        WeightLayout.of(module_of(policy))  # else each worker would draw its own weights


def check_excluded(
    patterns: Sequence[str], policy: object, models: Mapping[str, nn.Module]
) -> None:
    """Refuse a pattern of names to exclude that no weight has.

    Raises:
        ArgumentError: names the pattern.
    """
    names = state_tensors(published(policy, models))  # none where only a factory makes the policy
    for pattern in patterns if names else ():
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(
                f"WeightSync(exclude=[{pattern!r}]): no weight has such a name; these are the "
                f"names: {', '.join(names)}"
            )


def _check_buffer_takes(options: Any) -> None:
    """Check that the replay buffer can take what it is to be given.

    Raises:
        ArgumentError: it takes single steps or whole rollouts of several envs (``extend_buffer`` is
            False, or ``ndim`` above 1), and a batch is changed as a whole, or frames are left out.
    """
    ndim = num_dims(options.replay_buffer)
    if options.replay_buffer is None or (options.extend_buffer and ndim == 1):
        return
    changing = ("preemptive_threshold", "batch_deadline_s", "masked_bound")
    for name in (*changing, "split_trajs", "trajs_per_batch", *(["postproc"] if ndim == 1 else [])):
        value = getattr(options, name, None)
        if value is None or value is False:
            continue
        given = options.staleness if name == "masked_bound" else name
        why = f"{given} {'leaves out frames' if name in changing else 'needs whole batches'}"
        takes = "extend_buffer=False adds single steps to the replay buffer"
        remedy = "leave out one of them"
        if ndim > 1:
            takes = f"replay_buffer: its storage has ndim={ndim}, so it takes whole rollouts"
            remedy = "use a storage with ndim=1, or leave out the other"
        raise ArgumentError(f"{takes}, and {why}: {remedy}")


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


def worker_devices(options: Any, num_workers: int, *, elsewhere: bool) -> list[Devices]:
    """Return the devices of each worker; the argument ``device`` replaces others that are None.

    Args:
        options: the collector's arguments; each is a device or a list of one for each worker.
        num_workers: number of workers; 1 for a collector without workers.
        elsewhere: the envs and policies are on other hosts, which may have devices that this one
            lacks.

    Raises:
        ArgumentError: torch knows no such device, or this process needs it and doesn't have it; a
            list has another length; or batches would have to be delivered on several devices.
    """
    here = not elsewhere and current() is None
    given = {
        name: _for_each_worker(name, getattr(options, name), num_workers)
        for name in ("device", "storing_device", "env_device", "policy_device")
    }

    def chosen(name: str, worker_id: int, *, here: bool) -> torch.device | None:
        name = "device" if given[name][worker_id] is None else name
        return _device(name, given[name][worker_id], here=here)

    found = []
    for worker_id in range(num_workers):
        storing = chosen("storing_device", worker_id, here=True)
        env = chosen("env_device", worker_id, here=here)
        policy = chosen("policy_device", worker_id, here=here)
        if storing is None and env == policy == torch.device("cpu"):
            storing = policy  # they are there in any case: so batches say it, as TorchRL's do
        found.append(Devices(storing, env, policy))
    if len({each.storing for each in found}) > 1:
        raise ArgumentError(
            f"storing_device={options.storing_device!r}, device={options.device!r}: the frames of "
            "all workers have the same device in a batch: give one storing_device"
        )
    return found


def _for_each_worker(name: str, value: Any, num_workers: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * num_workers
    if num_workers == 1 and len({*map(str, value)}) == 1:
        return [value[0]]
    if len(value) != num_workers:
        raise ArgumentError(
            f"{name}={value!r}: a list has one device for each worker, and there are {num_workers}"
        )
    return list(value)


def _device(name: str, value: Any, *, here: bool) -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        if type(value) is not int or value < 0:
            raise ArgumentError(f"{name}={value!r}: {error}") from error
        device = torch.device("cuda", value)  # torch takes no number where it has no GPU
    if here and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        known = [f"'cuda:{index}'" for index in range(torch.cuda.device_count())]
        reason = "" if torch.version.cuda else ", and its torch was built without CUDA"
        raise ArgumentError(
            f"{name}={str(device)!r}: this process has only the GPUs {', '.join(known)}: use one "
            "of these, or 'cpu'"
            if known
            else f"{name}={str(device)!r}: this process has no GPU that torch can use{reason}: use "
            "'cpu', or leave the argument out"
        )
    return device


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
