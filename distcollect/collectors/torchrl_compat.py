"""Arguments by the names that TorchRL's collectors have for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, TypeVar, cast

from distcollect.collectors.validation import kinds
from distcollect.config import WeightSync
from distcollect.errors import ArgumentError, ArgumentTypeError

_NO_EFFECT = frozenset(
    {
        "auto_register_policy_transforms",  # recurrent policies need none
        "extend_buffer",  # whole batches always
        "no_cuda_sync",
        "replay_buffer_chunk",
        "return_same_td",
        "tcp_port",  # ports are the system's to choose
        "track_traj_ids",  # always
        "trust_policy",  # the policy is always tried out
        "use_buffers",  # a delivered batch is never written to again
        "use_env_creator",
    }
)
_Init = TypeVar("_Init", bound=Callable[..., None])

_WITHOUT_COLLECTOR = "one collector with several workers does what nested ones did"
_REFUSED: dict[str, str] = {
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
    "weight_recv_schemes": "pass weight_updater",
    "weight_sync_schemes": "pass weight_updater",
    "worker_idx": "worker_ids are given out by the collector",
}


def takes_torchrl_names(init: _Init) -> _Init:
    """Have a collector's ``__init__`` take TorchRL's names for its arguments as well."""
    signature = inspect.signature(init)
    own_names = signature.parameters.keys() - {"self"}
    flags = {p.name for p in signature.parameters.values() if str(p.annotation).startswith("bool")}

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        others = {name: value for name, value in kwargs.items() if name not in own_names}
        own = {name: value for name, value in kwargs.items() if name in own_names}
        given = signature.bind_partial(self, *args, **own).arguments
        del given["self"]
        arguments = _translated(others, given, own_names)
        kinds(arguments, flags)
        init(self, **arguments)

    return cast("_Init", wrapper)


def _translated(
    given: Mapping[str, Any], options: Mapping[str, Any], own_names: Set[str]
) -> dict[str, Any]:
    """``options`` with what ``given`` says in TorchRL's words.

    Args:
        given: further arguments of a collector.
        options: its own, by name.
        own_names: all that it has.

    Raises:
        ArgumentError: one of them makes no sense here; says why.
        ArgumentTypeError: there is no such argument.
    """
    merged = dict(options)
    names = dict(given)
    for name, value in _collector_kwargs(names.pop("collector_kwargs", None)).items():
        if name in own_names:
            merged[name] = value
        else:
            names[name] = value
    if names.pop("update_after_each_batch", False):
        merged["update_at_each_batch"] = True
    if not names.pop("reset_when_done", True):
        raise ArgumentError("reset_when_done=False: envs are always reset when their episode ends")
    if names.get("traj_format") == "padded":
        del names["traj_format"]
    _read_launcher(names)
    _read_backend(names, merged)
    _read_nested(names, merged)
    if (kwargs := names.pop("create_env_kwargs", None)) is not None:
        merged["create_env_fn"] = _with_kwargs(merged["create_env_fn"], kwargs)
    _refuse(names, own_names)
    for name in ("max_frames_per_traj", "init_random_frames", "max_weight_update_interval"):
        value = merged.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value == -1:
            merged[name] = None
    return merged


def _refuse(names: Mapping[str, Any], own_names: Set[str]) -> None:
    for name, value in names.items():
        if name in _NO_EFFECT:
            continue
        if name not in _REFUSED:
            raise ArgumentTypeError(
                f"there is no argument {name!r}; there are: {', '.join(sorted(own_names))}"
            )
        if value is not None and value is not False:
            raise ArgumentError(f"{name}={value!r} makes no sense here: {_REFUSED[name]}")


def _collector_kwargs(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    each = list(given) if isinstance(given, list | tuple) else [given]
    if not each or not all(isinstance(kwargs, Mapping) for kwargs in each):
        raise ArgumentTypeError(f"collector_kwargs={given!r}: must be a dict")
    if any(kwargs != each[0] for kwargs in each):
        raise ArgumentError(
            "collector_kwargs differ from worker to worker: here all have the same. Let the env "
            "makers differ, by a list of them or by their parameter 'context'"
        )
    return dict(each[0])


def _read_launcher(names: dict[str, Any]) -> None:
    launcher = names.pop("launcher", None)
    if launcher not in (None, "mp"):
        raise ArgumentError(
            f"launcher={launcher!r}: a collector starts local workers ('mp'), or uses the ranks of "
            "the launch that it is in: start those by torchrun or SLURM, with distcollect.run(main)"
        )


def _read_backend(names: dict[str, Any], merged: dict[str, Any]) -> None:
    backend = names.pop("backend", None)
    if backend is None:
        return
    if backend not in ("gloo", "nccl"):
        raise ArgumentError(f"backend={backend!r}: use 'gloo' or 'nccl'")
    if merged.get("weight_sync") is None:
        merged["weight_sync"] = WeightSync(backend=backend)


def _read_nested(names: dict[str, Any], merged: dict[str, Any]) -> None:
    """A collector within each worker: its kind, and how many workers that one had."""
    kind = names.pop("collector_class", None)
    known = {
        "single", "sync", "async", "Collector", "SyncDataCollector", "MultiSyncCollector",
        "MultiSyncDataCollector", "MultiAsyncCollector", "MultiaSyncDataCollector",
    }  # fmt: skip
    if kind is not None and (kind if isinstance(kind, str) else kind.__name__) not in known:
        raise ArgumentError(f"collector_class={kind!r} makes no sense here: {_WITHOUT_COLLECTOR}")
    per_collector = names.pop("num_workers_per_collector", None)
    if per_collector in (None, 1):
        return
    if isinstance(per_collector, bool) or not isinstance(per_collector, int) or per_collector < 1:
        raise ArgumentError(
            f"num_workers_per_collector={per_collector!r}: must be a whole number, 1 or more"
        )
    makers = merged["create_env_fn"]
    if isinstance(makers, list | tuple):
        merged["create_env_fn"] = [maker for maker in makers for _ in range(per_collector)]
    elif merged.get("num_workers") is not None:
        merged["num_workers"] *= per_collector


def _with_kwargs(makers: Any, kwargs: Any) -> Any:
    each = list(makers) if isinstance(makers, list | tuple) else None
    if isinstance(kwargs, Mapping):
        if each is None:
            return partial(makers, **kwargs)
        return [partial(maker, **kwargs) for maker in each]
    if each is None or len(kwargs) != len(each):
        raise ArgumentError(
            f"create_env_kwargs={kwargs!r}: a list needs one dict for each maker in the list that "
            "create_env_fn is then"
        )
    return [partial(maker, **own) for maker, own in zip(each, kwargs, strict=True)]
