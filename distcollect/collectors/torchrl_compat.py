"""Translates the arguments of TorchRL's collectors into those of ours.

An argument that TorchRL and we have under one name needs nothing here. Each other one stands in
one of three tables: :data:`NO_EFFECT`, :data:`REFUSED`, or :data:`TRANSLATIONS`. Weight-sync
schemes are in :mod:`.torchrl_weights`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from distcollect.collectors.torchrl_weights import check_updater_in_process, take_schemes
from distcollect.config import WeightSync
from distcollect.errors import ArgumentError, ArgumentTypeError

# Accepted, and ignored: the comment says why nothing is lost.
NO_EFFECT = frozenset(
    {
        "auto_register_policy_transforms",  # recurrent policies need none
        "extend_buffer",  # a buffer always gets whole batches
        "no_cuda_sync",
        "replay_buffer_chunk",
        "return_same_td",
        "tcp_port",  # the system chooses the ports
        "track_traj_ids",  # always
        "trust_policy",  # a worker always tries the policy once
        "use_buffers",  # a delivered batch is never written to again
        "use_env_creator",
    }
)

# Accepted only as None or False: the text says what to do instead.
REFUSED: dict[str, str] = {
    "backend_options": "pass these to the collector itself",
    "compile_policy": "compile the policy yourself: policy_factory=lambda: torch.compile(...)",
    "cudagraph_policy": "wrap the policy yourself, with tensordict.nn.CudaGraphModule",
    "init_fn": "do it in the env maker, or in policy_factory: both run in the worker",
    "interruptor": "use preemptive_threshold or batch_deadline_s",
    "local_init_rb": "workers don't write to the replay buffer: the trainer does, in start()",
    "num_collectors": "use num_workers",
    "num_sub_threads": "a worker computes on one thread, or as many as OMP_NUM_THREADS says",
    "num_threads": "call torch.set_num_threads() in the trainer",
    "post_collect_hook": "use postproc, which gets each batch",
    "pre_collect_hook": "do it between two batches, in your loop",
    "ray_init_config": "there is no Ray here: start the ranks by torchrun or SLURM",
    "remote_configs": "there is no Ray here: start the ranks by torchrun or SLURM",
    "slurm_kwargs": "start the ranks by SLURM and call distcollect.run(main)",
    "tensorpipe_options": "Faults(...) has the deadlines; the rest is chosen here",
    "track_policy_version": "every frame has its ('collector', 'policy_version')",
    "traj_format": "batches of whole trajectories are padded, with ('collector', 'mask')",
    "trajs_per_write": "a batch goes to the replay buffer as a whole; see trajs_per_batch",
    "update_interval": "use update_at_each_batch, or call update_policy_weights_ when you want",
    "visible_devices": "set policy_device, and storing_device for where batches are wanted",
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
    for name, value in _collector_kwargs(names.pop("collector_kwargs", None)).items():
        (arguments if name in own_names else names)[name] = value
    take_schemes(names, arguments, own_names)
    for name, translate in TRANSLATIONS.items():
        if name in names:
            translate(names.pop(name), arguments)
    for name, value in names.items():
        if name in NO_EFFECT:
            continue
        if name not in REFUSED:
            raise ArgumentTypeError(_unknown(name, own_names))
        if value is not None and value is not False:
            raise ArgumentError(f"{name}={value!r} makes no sense here: {REFUSED[name]}")
    for name in _NONE_IF_MINUS_ONE:
        value = arguments.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value == -1:
            arguments[name] = None
    return arguments


def _unknown(name: str, own_names: Set[str]) -> str:
    near = difflib.get_close_matches(name, own_names, n=1, cutoff=0.7)
    suggestion = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no argument {name!r}{suggestion}; there are: {', '.join(sorted(own_names))}"


def _collector_kwargs(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    each = list(given) if isinstance(given, list | tuple) else [given]
    if not each or not all(isinstance(kwargs, Mapping) for kwargs in each):
        raise ArgumentTypeError(f"collector_kwargs={given!r}: must be a dict")
    if any(kwargs != each[0] for kwargs in each):
        raise ArgumentError(
            "collector_kwargs differ from worker to worker: here all workers have the same. Let "
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


def _num_workers_per_collector(value: Any, arguments: dict[str, Any]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            f"num_workers_per_collector={value!r}: must be a whole number, 1 or more"
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


def _traj_format(value: Any, _: dict[str, Any]) -> None:
    if value not in (None, False, "padded"):
        raise ArgumentError(f"traj_format={value!r} makes no sense here: {REFUSED['traj_format']}")


def _launcher(value: Any, _: dict[str, Any]) -> None:
    if value not in (None, "mp"):
        raise ArgumentError(
            f"launcher={value!r}: a collector starts local workers ('mp'), or uses the ranks of "
            "its launch: start those by torchrun or SLURM, with distcollect.run(main)"
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
    "traj_format": _traj_format,
    "launcher": _launcher,
    "backend": _backend,
    "collector_class": _collector_class,
    # The env makers are repeated before each gets its own arguments.
    "num_workers_per_collector": _num_workers_per_collector,
    "create_env_kwargs": _create_env_kwargs,
    # Of collectors that have no workers; the others have an argument of this name.
    "weight_updater": check_updater_in_process,
}
