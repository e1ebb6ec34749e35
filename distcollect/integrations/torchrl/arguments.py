"""Translates the arguments of TorchRL's collectors into those of ours.

An argument that TorchRL and we have under one name needs nothing here. Of the others some have no
effect (:data:`_WITHOUT_EFFECT`), and the rest is translated. Weight-sync schemes are in
:mod:`.weights`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from operator import not_
from typing import Any

import gymnasium as gym
import torch

from distcollect.collectors.user_code import users_stack_level
from distcollect.common.checks import plain, unknown_argument
from distcollect.config import WeightSync
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.integrations.torchrl.weights import check_updater_in_process, take_schemes
from distcollect.launch.open_hosts import current

# What to do instead; "": nothing is lost.
_WITHOUT_EFFECT = {
    "local_init_rb": "",  # the trainer fills the buffer
    "no_cuda_sync": "",
    "return_same_td": "",
    "tcp_port": "",  # the system chooses the ports
    "trajs_per_write": "",  # how many are written at a time changes no content
    "trust_policy": "",  # a worker always tries the policy once
    "use_buffers": "",  # a delivered batch is never written to again
    "use_env_creator": "",
    # These change how fast frames are collected, but not which.
    "compile_policy": "to compile the policy, pass policy_factory=lambda: torch.compile(...)",
    "cudagraph_policy": "wrap the policy yourself, with tensordict.nn.CudaGraphModule",
    "num_threads": "call torch.set_num_threads() in the trainer",
    "tensorpipe_options": "Faults(...) has the deadlines; the rest is chosen here",
    "visible_devices": "set policy_device, and storing_device for where batches are wanted",
}

# The collectors inside of a worker that TorchRL needs, and ours do without.
_INNER_CLASSES = {
    "single", "sync", "async", "Collector", "SyncDataCollector", "MultiSyncCollector",
    "MultiSyncDataCollector", "MultiAsyncCollector", "MultiaSyncDataCollector",
}  # fmt: skip


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _is_inner_class(value: Any) -> bool:
    return value is None or (value if isinstance(value, str) else value.__name__) in _INNER_CLASSES


_LAUNCH = (
    "a collector starts local workers ('mp'), or uses the ranks of its launch: start those by "
    "torchrun or SLURM, with `-m distcollect run SCRIPT`, or with distcollect.run(main) in the "
    "script"
)
_RAY = "a RayDataCollector takes it, whose workers Ray starts"
_COUNT = "must be a whole number, 1 or more"
# Which values are taken, and what is said of others.
_TAKEN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reset_when_done": (bool, "envs are always reset when their episode ends"),
    "launcher": (lambda value: value in (None, "mp") or current() is not None, _LAUNCH),
    "slurm_kwargs": (lambda value: not value or current() is not None, _LAUNCH),
    "collector_class": (_is_inner_class, "one collector with several workers replaces nested ones"),
    "backend": (lambda value: value in (None, "gloo", "nccl"), "use 'gloo' or 'nccl'"),
    "update_interval": (
        lambda value: value in (None, False, 1),
        "use 1, for new weights after each batch, or call update_policy_weights_ when you want",
    ),
    "num_sub_threads": (_is_count, _COUNT),
    "num_workers_per_collector": (_is_count, _COUNT),
    "interruptor": (not_, "use preemptive_threshold or batch_deadline_s"),
    "ray_init_config": (not_, _RAY),
    "remote_configs": (not_, _RAY),
    "weight_recv_schemes": (not_, "leave weight_recv_schemes out: workers receive by themselves"),
    "worker_idx": (not_, "worker_ids are given out by the collector"),
    "seed": (lambda _: False, "call collector.set_seed(...) before the first batch"),
}
_TRANSLATED = {
    "update_after_each_batch", "num_collectors", "replay_buffer_chunk", "create_env_kwargs",
    "weight_updater",
}  # fmt: skip
# Arguments of ours for which TorchRL's -1 means "none".
_NONE_IF_MINUS_ONE = ("max_frames_per_traj", "init_random_frames", "max_weight_update_interval")


def translated(
    given: Mapping[str, Any], options: Mapping[str, Any], own_names: Set[str]
) -> dict[str, Any]:
    """``options``, changed as the arguments in ``given`` ask for.

    Args:
        given: arguments that the collector doesn't have under these names.
        options: the collector's own arguments, by name.
        own_names: the names of all arguments that the collector has.

    Raises:
        ArgumentError: the collector can't do what an argument asks for; says what to do instead.
        ArgumentTypeError: there is no such argument, here or in TorchRL.
    """
    arguments = dict(options)
    names = dict(given)
    for bundle in ("collector_kwargs", "backend_options"):
        for name, value in _bundled(bundle, names.pop(bundle, None)).items():
            (arguments if name in own_names else names)[name] = value
    take_schemes(names, arguments, own_names)
    for name, value in names.items():
        if name in _TAKEN:
            takes, advice = _TAKEN[name]
            if not takes(value):
                raise ArgumentError(f"{name}={value!r}: {advice}")
        elif name not in {*_WITHOUT_EFFECT, *_TRANSLATED}:
            raise ArgumentTypeError(unknown_argument(name, own_names))
        elif value and (instead := _WITHOUT_EFFECT.get(name)):
            warnings.warn(
                f"{name}={value!r} has no effect here: {instead}", stacklevel=users_stack_level()
            )
    _translate_settings(names, arguments)
    _translate_makers(names, arguments)
    for name in _NONE_IF_MINUS_ONE:
        if type(arguments.get(name)) is int and arguments[name] == -1:
            arguments[name] = None
    _read_numbers(arguments)
    return arguments


def _translate_settings(names: Mapping[str, Any], arguments: dict[str, Any]) -> None:
    if "weight_updater" in names:  # of a collector without workers: others have it themselves
        check_updater_in_process(names["weight_updater"])
    if names.get("update_after_each_batch") or names.get("update_interval"):
        arguments["update_at_each_batch"] = True
    if names.get("backend") is not None and arguments.get("weight_sync") is None:
        arguments["weight_sync"] = WeightSync(backend=names["backend"])
    if names.get("replay_buffer_chunk") is not None:
        arguments["extend_buffer"] = names["replay_buffer_chunk"]
    if names.get("num_sub_threads") is not None:
        init_fn = arguments.get("init_fn")
        arguments["init_fn"] = partial(_set_threads, names["num_sub_threads"], init_fn)


def _set_threads(num_threads: int, then: Callable[[], Any] | None) -> None:
    torch.set_num_threads(num_threads)
    if then is not None:
        then()


def _translate_makers(names: Mapping[str, Any], arguments: dict[str, Any]) -> None:
    """Read what says how many workers there are, and what their env makers get."""
    makers: Any = arguments.get("create_env_fn")
    is_list = isinstance(makers, list | tuple)
    count, repeats = names.get("num_collectors"), names.get("num_workers_per_collector") or 1
    if count is not None and not is_list:
        arguments["num_workers"] = count
    elif count is not None and len(makers) != count:
        raise ArgumentError(
            f"num_collectors={count!r} does not match the {len(makers)} env maker(s) in "
            "create_env_fn: a list has one for each"
        )
    if repeats > 1 and arguments.get("remote_configs") is not None:
        raise ArgumentError(
            f"num_workers_per_collector={repeats} and remote_configs: each worker has an actor of "
            "its own here. Give num_workers, and in remote_configs what one worker needs"
        )
    if is_list and repeats > 1:
        arguments["create_env_fn"] = makers = [each for each in makers for _ in range(repeats)]
    elif not is_list and arguments.get("num_workers") is not None:
        arguments["num_workers"] *= repeats
    if (kwargs := names.get("create_env_kwargs")) is not None:
        arguments["create_env_fn"] = _with_kwargs(makers, kwargs)


def _with_kwargs(makers: Any, kwargs: Any) -> Any:
    """The env maker or makers, called with a dict for all or with one for each."""
    is_list = isinstance(makers, list | tuple)
    for_each = kwargs
    if isinstance(kwargs, Mapping):
        for_each = [kwargs] * (len(makers) if is_list else 1)
    elif not is_list or len(kwargs) != len(makers):
        raise ArgumentError(
            f"create_env_kwargs={kwargs!r}: a list needs one dict for each maker, and "
            "create_env_fn must be a list of makers then"
        )
    for maker in makers if is_list else [makers]:
        if not callable(maker):
            raise ArgumentTypeError(
                f"create_env_kwargs={kwargs!r} and create_env_fn={maker!r}: only a callable takes "
                "them; pass one that makes the env, as in lambda **kwargs: gymnasium.make(...)"
            )
    if not is_list:
        return partial(makers, **for_each[0])
    return [partial(maker, **own) for maker, own in zip(makers, for_each, strict=True)]


def _read_numbers(arguments: dict[str, Any]) -> None:
    """Read ``frames_per_batch`` as a list, and whole numbers that are floats, such as 1e6."""
    frames = arguments.get("frames_per_batch")
    if isinstance(frames, list | tuple):
        arguments["frames_per_batch"] = _sum_of_workers([*map(plain, frames)], arguments)
    for name in ("frames_per_batch", "total_frames"):
        value = arguments.get(name)
        if isinstance(value, float) and value.is_integer():
            arguments[name] = int(value)


def _sum_of_workers(frames: list[Any], arguments: Mapping[str, Any]) -> Any:
    makers = arguments.get("create_env_fn")
    count = len(makers) if isinstance(makers, list | tuple) else arguments.get("num_workers")
    if len(frames) != count or not all(isinstance(each, int) for each in frames):
        raise ArgumentError(
            f"frames_per_batch={frames}: If `frames_per_batch` is provided as a sequence, it "
            f"should contain exactly one value per worker. There are {count} workers"
        )
    if len(set(frames)) > 1:
        warnings.warn(
            f"frames_per_batch={frames}: all workers collect the same number of frames here; a "
            f"batch has {sum(frames)}",
            stacklevel=users_stack_level(),
        )
    return sum(frames)


def _bundled(name: str, given: Any) -> Mapping[str, Any]:
    """The arguments in ``collector_kwargs`` or ``backend_options``."""
    if given is None:
        return {}
    each = list(given) if isinstance(given, list | tuple) else [given]
    if not each or not all(isinstance(kwargs, Mapping) for kwargs in each):
        raise ArgumentTypeError(f"{name}={given!r}: must be a dict")
    if any(kwargs != each[0] for kwargs in each):
        raise ArgumentError(
            f"{name} differ from worker to worker: here all workers have the same. Let "
            "the env makers differ, by a list of them or by their parameter 'context'"
        )
    return dict(each[0])


def may_make_torchrl_envs(makers: Sequence[object]) -> bool:
    """Return True if the makers are, or may make, TorchRL's envs, as only calling them shows.

    Without TorchRL in this process, or for a class or env of Gymnasium, they can't.
    """
    return "torchrl.envs" in sys.modules and not any(
        isinstance(maker, str | gym.Env | gym.vector.VectorEnv)
        or (isinstance(maker, type) and issubclass(maker, gym.Env | gym.vector.VectorEnv))
        for maker in makers
    )


def backend_of_context() -> Any:
    """The backend that an enclosing ``torchrl.service_backend(...)`` selects; None: none does."""
    module = sys.modules.get("torchrl._comm.backends")  # there is none before TorchRL 0.14
    return getattr(module, "_get_service_backend", lambda: None)()


# TorchRL's name for each class of ours that it has too.
_THEIR_CLASSES = {
    "DataCollectorBase": "BaseCollector",
    "SyncDataCollector": "Collector",
    "aSyncDataCollector": "AsyncCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
}


def make_known_to_torchrl(kind: type) -> None:
    """Let ``isinstance`` take objects of class ``kind`` for those of TorchRL's class of that name.

    TorchRL's trainers refuse a collector that is not a ``torchrl.collectors.BaseCollector``.
    """
    # Importing torchrl has side effects, and trainers import this module before they are used.
    module = sys.modules.get("torchrl.collectors")
    for base in kind.__mro__:
        theirs = getattr(module, _THEIR_CLASSES.get(base.__name__, ""), None)
        if theirs is not None:
            theirs.register(base)
