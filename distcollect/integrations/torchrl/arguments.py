"""Translates the arguments of TorchRL's collectors into those of ours.

An argument that TorchRL and we have under one name needs nothing here. Each other one stands in
one of four tables: :data:`NO_EFFECT`, :data:`WARNED`, :data:`REFUSED`, or :data:`TRANSLATIONS`.
Weight-sync schemes are in :mod:`.torchrl_weights`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch

from distcollect.collectors.stacklevel import users_stack_level
from distcollect.common.checks import plain
from distcollect.common.suggestions import unknown_argument
from distcollect.config import WeightSync
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.integrations.torchrl.weights import check_updater_in_process, take_schemes
from distcollect.launch.open_hosts import current

# Accepted, and ignored: the comment says why nothing is lost.
NO_EFFECT = frozenset(
    {
        "local_init_rb",  # the trainer fills the buffer
        "no_cuda_sync",
        "return_same_td",
        "tcp_port",  # the system chooses the ports
        "trajs_per_write",  # how many are written at a time changes no content
        "trust_policy",  # a worker always tries the policy once
        "use_buffers",  # a delivered batch is never written to again
        "use_env_creator",
    }
)

# Accepted with a warning, as they change how fast frames are collected, but not which.
WARNED: dict[str, str] = {
    "compile_policy": "to compile the policy, pass policy_factory=lambda: torch.compile(...)",
    "cudagraph_policy": "wrap the policy yourself, with tensordict.nn.CudaGraphModule",
    "num_threads": "call torch.set_num_threads() in the trainer",
    "tensorpipe_options": "Faults(...) has the deadlines; the rest is chosen here",
    "visible_devices": "set policy_device, and storing_device for where batches are wanted",
}

# Accepted only as None or False: the text says what to do instead.
REFUSED: dict[str, str] = {
    "interruptor": "use preemptive_threshold or batch_deadline_s",
    "ray_init_config": "a RayDataCollector takes it, whose workers Ray starts",
    "remote_configs": "a RayDataCollector takes it, whose workers Ray starts",
    "worker_idx": "worker_ids are given out by the collector",
}


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
    for name, translate in TRANSLATIONS.items():
        if name in names:
            translate(names.pop(name), arguments)
    for name, value in names.items():
        if name not in NO_EFFECT:
            _check_without_effect(name, value, own_names)
    for name in _NONE_IF_MINUS_ONE:
        value = arguments.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value == -1:
            arguments[name] = None
    _read_numbers(arguments)
    return arguments


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


def _check_without_effect(name: str, value: Any, own_names: Set[str]) -> None:
    """Warn or raise if an argument asks for something that the collector doesn't do."""
    if name not in WARNED and name not in REFUSED:
        raise ArgumentTypeError(unknown_argument(name, own_names))
    if value is None or value is False:
        return
    if name in REFUSED:
        raise ArgumentError(f"{name}={value!r} makes no sense here: {REFUSED[name]}")
    warnings.warn(
        f"{name}={value!r} has no effect here: {WARNED[name]}", stacklevel=users_stack_level()
    )


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


# Each takes the value, and changes the collector's arguments if the value asks for it.


def _update_after_each_batch(value: Any, arguments: dict[str, Any]) -> None:
    if value:
        arguments["update_at_each_batch"] = True


def _backend(value: Any, arguments: dict[str, Any]) -> None:
    if value not in (None, "gloo", "nccl"):
        raise ArgumentError(f"backend={value!r}: use 'gloo' or 'nccl'")
    if value is not None and arguments.get("weight_sync") is None:
        arguments["weight_sync"] = WeightSync(backend=value)


def _num_collectors(value: Any, arguments: dict[str, Any]) -> None:
    if value is None:
        return
    makers = arguments.get("create_env_fn")
    if not isinstance(makers, list | tuple):
        arguments["num_workers"] = value
    elif len(makers) != value:
        raise ArgumentError(
            f"num_collectors={value!r} does not match the {len(makers)} env maker(s) in "
            "create_env_fn: a list has one for each"
        )


def _update_interval(value: Any, arguments: dict[str, Any]) -> None:
    if value not in (None, False, 1):
        raise ArgumentError(
            f"update_interval={value!r}: use 1, for new weights after each batch, or call "
            "update_policy_weights_ when you want"
        )
    if value:
        arguments["update_at_each_batch"] = True


def _replay_buffer_chunk(value: Any, arguments: dict[str, Any]) -> None:
    if value is not None:
        arguments["extend_buffer"] = value


class _SetThreads:
    """Sets the number of threads that torch uses, then calls another function."""

    def __init__(self, num_threads: int, then: Callable[[], Any] | None) -> None:
        self._num_threads = num_threads
        self._then = then

    def __call__(self) -> None:
        torch.set_num_threads(self._num_threads)
        if self._then is not None:
            self._then()


def _num_sub_threads(value: Any, arguments: dict[str, Any]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"num_sub_threads={value!r}: must be a whole number, 1 or more")
    arguments["init_fn"] = _SetThreads(value, arguments.get("init_fn"))


def _num_workers_per_collector(value: Any, arguments: dict[str, Any]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            f"num_workers_per_collector={value!r}: must be a whole number, 1 or more"
        )
    if value > 1 and arguments.get("remote_configs") is not None:
        raise ArgumentError(
            f"num_workers_per_collector={value!r} and remote_configs: each worker has an actor of "
            "its own here. Give num_workers, and in remote_configs what one worker needs"
        )
    makers = arguments.get("create_env_fn")
    if isinstance(makers, list | tuple):
        arguments["create_env_fn"] = [maker for maker in makers for _ in range(value)]
    elif arguments.get("num_workers") is not None:
        arguments["num_workers"] *= value


def _create_env_kwargs(value: Any, arguments: dict[str, Any]) -> None:
    makers: Any = arguments.get("create_env_fn")
    if value is None:
        return
    if not isinstance(makers, list | tuple):
        if not isinstance(value, Mapping):
            raise _unequal_lists(value)
        arguments["create_env_fn"] = partial(makers, **value)
        return
    each = [value] * len(makers) if isinstance(value, Mapping) else list(value)
    if len(each) != len(makers):
        raise _unequal_lists(value)
    arguments["create_env_fn"] = [
        partial(maker, **kwargs) for maker, kwargs in zip(makers, each, strict=True)
    ]


def _unequal_lists(value: Any) -> ArgumentError:
    return ArgumentError(
        f"create_env_kwargs={value!r}: a list needs one dict for each maker, and create_env_fn "
        "must be a list of makers then"
    )


# The next ones change nothing: they only refuse values.


def _reset_when_done(value: Any, _: dict[str, Any]) -> None:
    if not value:
        raise ArgumentError("reset_when_done=False: envs are always reset when their episode ends")


def _launcher(value: Any, _: dict[str, Any]) -> None:
    if value not in (None, "mp"):
        _check_launched(f"launcher={value!r}")


def _slurm_kwargs(value: Any, _: dict[str, Any]) -> None:
    if value:
        _check_launched(f"slurm_kwargs={value!r}")


def _check_launched(argument: str) -> None:
    """Refuse an argument that asks for processes, unless this process has a launch with workers."""
    if current() is None:
        raise ArgumentError(
            f"{argument}: a collector starts local workers ('mp'), or uses the ranks of its "
            "launch: start those by torchrun or SLURM, with `-m distcollect run SCRIPT`, or with "
            "distcollect.run(main) in the script"
        )


# The collectors inside of a worker that TorchRL needs, and ours do without.
_INNER_CLASSES = {
    "single", "sync", "async", "Collector", "SyncDataCollector", "MultiSyncCollector",
    "MultiSyncDataCollector", "MultiAsyncCollector", "MultiaSyncDataCollector",
}  # fmt: skip


def _collector_class(value: Any, _: dict[str, Any]) -> None:
    name = value if isinstance(value, str | None) else value.__name__
    if name is not None and name not in _INNER_CLASSES:
        raise ArgumentError(
            f"collector_class={value!r} makes no sense here: one collector with several workers "
            "does what nested ones did"
        )


TRANSLATIONS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "update_after_each_batch": _update_after_each_batch,
    "reset_when_done": _reset_when_done,
    "launcher": _launcher,
    "slurm_kwargs": _slurm_kwargs,
    "backend": _backend,
    "num_collectors": _num_collectors,
    "num_sub_threads": _num_sub_threads,
    "update_interval": _update_interval,
    "replay_buffer_chunk": _replay_buffer_chunk,
    "collector_class": _collector_class,
    # The env makers are repeated before each gets its own arguments.
    "num_workers_per_collector": _num_workers_per_collector,
    "create_env_kwargs": _create_env_kwargs,
    # Of collectors that have no workers; the others have an argument of this name.
    "weight_updater": check_updater_in_process,
}
