"""Which private parts of other packages are used; each must be there, or have a fallback."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from helpers.publishing import Collect, Telling, collect, told

import distcollect as dc
from distcollect.policy import per_env_rng
from distcollect.weights import broadcast

__all__ = ["collect"]

PACKAGE = Path(dc.__file__).parent


@dataclass(frozen=True)
class Part:
    """A private part of another package.

    Attributes:
        owner: the module or class that has it.
        name: its name there. Several are separated by spaces.
        purpose: what it is used for.
        without: what happens with a version that lacks it.
    """

    owner: str
    name: str
    purpose: str
    without: str

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"


_NO_RPC = "LaunchError before any process is started; `distcollect doctor` says it too"
_NO_RNG = "a seed for a policy that draws random numbers is a PolicyError"
_NO_INPUTS = "no collector can be made with a policy"
_IN_CALLS = "each worker on another host gets weights in a call; backend='gloo' is an ArgumentError"
_OWN_METHOD = "the env waits by its own method, which takes longer"

PARTS = [
    Part("torch.distributed.rpc", "TensorPipeAgent WorkerInfo", "RPC without groups", _NO_RPC),
    Part(
        "torch.distributed.rpc.TensorPipeAgent",
        "_update_group_membership",
        "workers join and leave",
        _NO_RPC,
    ),
    Part(
        "torch.distributed.rpc.api",
        "_init_rpc_states _finalize_shutdown _is_current_rpc_agent_set _reset_current_rpc_agent",
        "to start, replace and end an RPC agent",
        _NO_RPC,
    ),
    Part(
        "torch.distributed.rpc.PyRRef",
        "_serialize _deserialize",
        "a rollout's RRef goes to the trainer and back to its owner",
        _NO_RPC,
    ),
    Part("torch.distributed.autograd", "_init", "without it, no RPC agent starts", _NO_RPC),
    Part(
        "torch._C",
        "DispatchKeySet _dispatch_key_parse _ExcludeDispatchKeyGuard _IncludeDispatchKeyGuard",
        "random numbers of policies, drawn for each env",
        _NO_RNG,
    ),
    Part("torch._C", "_storage_Use_Count", "to see that a policy keeps its input", _NO_INPUTS),
    Part("torch.UntypedStorage", "_cdata", "the same", _NO_INPUTS),
    Part(
        "tensordict.TensorDict",
        "_new_unsafe",
        "a batch is made without looking at each entry",
        "no batch can be made",
    ),
    Part(
        "torch.distributed.ProcessGroupGloo",
        "_Options create_device",
        "groups on one interface, whose members do not wait for each other",
        _IN_CALLS,
    ),
    Part("torch.distributed.ProcessGroupGloo._Options", "_devices _timeout", "the same", _IN_CALLS),
    Part(
        "torch.distributed.Backend",
        "_plugins",
        "groups of a backend that was registered",
        "an ArgumentError for WeightSync(backend=...) with such a name",
    ),
    Part(
        "torch.cuda",
        "_is_in_bad_fork",
        "to find out that the zygote has used CUDA, and to start workers by themselves then",
        "a worker on a GPU fails with torch's message; DISTCOLLECT_ZYGOTE=off helps",
    ),
    Part(
        "torchrl.envs.ParallelEnv",
        "_wait_for_workers",
        "waiting for ParallelEnv's processes without taking a core",
        _OWN_METHOD,
    ),
    Part(
        "torchrl.collectors._base",
        "_ProfilerHook",
        "to profile the first rollouts",
        "ArgumentError of enable_profile(), which names it",
    ),
    Part(
        "submitit.slurm.slurm",
        "_make_sbatch_string",
        "to show and test an sbatch file before a job is submitted",
        "LaunchError before a job is submitted; `distcollect submit --no-check` works",
    ),
    Part(
        "envpool.classic_control.CartPoleGymnasiumEnvPool",
        "_from _recv _reset _send _state_keys _to",
        "to step EnvPool's envs",
        "ArgumentError: for an env id before any process is started, else once the env is made",
    ),
]
# Attributes that only objects have, once they are made: those that use them look for them first.
OF_OBJECTS = {
    "_shm_done_flags _workers": "torchrl",
    "_worker_indices": "torchrl, since 0.14",
    "_get_service_backend": "torchrl, since 0.14: of a module",
}
# Public, although their names begin with an underscore.
PUBLIC = {
    "_exit": "os",
    "_current_frames": "sys",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
    "_C": "torch; what is used of it is above",
}
OBJECTS = {name for names in OF_OBJECTS for name in names.split()}
NAMES = {name for part in PARTS for name in part.name.split()}


@pytest.mark.filterwarnings("ignore:Creating .* WeightUpdaterBase:DeprecationWarning")
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_it_is_there(part: Part) -> None:
    package = part.owner.split(".", maxsplit=1)[0]
    pytest.importorskip(package)
    owner = _resolve(part.owner)
    missing = [name for name in part.name.split() if not hasattr(owner, name)]
    assert not missing, (
        f"{package} {importlib.metadata.version(package)} lacks {part.owner}.{', '.join(missing)}, "
        f"which is used for this: {part.purpose}. Without it: {part.without}"
    )


def _resolve(path: str) -> Any:
    """A module, or something in one, by its path."""
    names = path.split(".")
    found: Any = importlib.import_module(names[0])
    for index, name in enumerate(names[1:], start=2):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(names[:index]))
            except ImportError:
                return None
    return found


def test_the_table_is_complete() -> None:
    """Each private name in the code is of this package, in the table, or public after all."""
    used, defined = set(), set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            used |= _private_names_used(node)
            defined |= _names_defined(node)
    assert used - defined - NAMES - OBJECTS - PUBLIC.keys() == set()
    unused = (NAMES | OBJECTS) - used
    assert {name for name in unused if name.startswith("_")} == set()


def _private_names_used(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return {node.attr} if _is_private(node.attr) and not is_own else set()
    if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("distcollect"):
        from_private = any(_is_private(name) for name in (node.module or "").split("."))
        return {alias.name for alias in node.names if from_private or _is_private(alias.name)}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(), hasattr()
        return {node.value} & (NAMES | OBJECTS)
    return set()


def _names_defined(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return {node.id if isinstance(node, ast.Name) else node.attr}
    return set()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("lacking", ["the key", "a function"])
def test_seeded_policies_without_the_dispatch_key(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "the key":
        monkeypatch.setattr(per_env_rng, "KEY_NAME", "NoSuchKey")
    else:
        monkeypatch.delattr(torch._C, "_IncludeDispatchKeyGuard")
    monkeypatch.setattr(per_env_rng, "_redirected", per_env_rng.register())
    settings = {"frames_per_batch": 4}
    with dc.SyncDataCollector("CartPole-v1", lambda x: x[:, 2] > 0, **settings) as collector:
        collector.set_seed(3)
        with pytest.raises(dc.PolicyError, match=r"has no way to draw .* use torch 2"):
            collector.next()


def test_weights_without_gloos_private_parts(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(broadcast.default_updater("gloo"), broadcast.BroadcastUpdater)
    monkeypatch.delattr(torch.distributed.ProcessGroupGloo, "_Options")
    with pytest.raises(dc.ArgumentError, match=r"lacks _Options, torch .*; use backend='auto'"):
        broadcast.default_updater("gloo")
    updater = broadcast.default_updater("auto")
    collector = collect(weight_updater=updater)
    assert collector.update_policy_weights_(Telling(1)).acknowledged == {0: 1, 1: 1}
    assert told(collector.next())["wide"] == 1
    assert not updater.together
