"""Other projects that distcollect works with, each in a place of its own.

The packages below :mod:`distcollect.collectors` name none of them. They look up what they need by
what it is for, so that it is imported when it is first used: to import some of these projects has
side effects.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# What it is for, and the module or the name in one that does it.
_ENTRY_POINTS = {
    "backend of a context": "distcollect.integrations.torchrl.arguments:backend_of_context",
    "check of a buffer": "distcollect.integrations.torchrl.storages:check_can_hold",
    "collector of ray": "distcollect.integrations.ray.collector:RayDataCollector",
    "engine of torchrl": "distcollect.integrations.torchrl.engine:TensorDictEngine",
    "envs of envpool": "distcollect.integrations.envpool.kind:KIND",
    "envs of pettingzoo": "distcollect.integrations.pettingzoo:KIND",
    "envs of torchrl": "distcollect.integrations.torchrl.envs:KIND",
    "ids of envpool": "distcollect.integrations.envpool.kind:EnvPoolMaker",
    "names of arguments": "distcollect.integrations.torchrl.arguments:translated",
    "names of weights": "distcollect.integrations.torchrl.weights:weights_among",
    "profiler": "distcollect.integrations.torchrl.profiler:ProfilerHook",
    "ray job": "distcollect.integrations.ray.job",
    "rounding of frames": "distcollect.integrations.torchrl.arguments:may_make_torchrl_envs",
    "storage of a buffer": "distcollect.integrations.torchrl.storages:storage_of",
    "trainers": "distcollect.integrations.torchrl.arguments:make_known_to_torchrl",
    "weight updater": "distcollect.integrations.torchrl.weights:made_updater",
}
# What makes use of a class of envs, which are in these modules.
_ENVS = {
    ("torchrl.envs.common", "EnvBase"): "envs of torchrl",
    ("pettingzoo.utils.env", "ParallelEnv"): "envs of pettingzoo",
    ("envpool.python.gymnasium_envpool", "GymnasiumEnvPoolMixin"): "envs of envpool",
}


def load(purpose: str) -> Any:
    """Import the module, or the name in a module (MODULE:NAME), that serves this purpose."""
    module, _, name = _ENTRY_POINTS[purpose].partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def load_for(env: object) -> Any:
    """Import the :class:`~distcollect.envs.kinds.EnvKind` of an env; None: no project's.

    No project is imported for that: where it never was, no object is an env of it.
    """
    for (module, name), purpose in _ENVS.items():
        imported = sys.modules.get(module)
        if imported is not None and isinstance(env, getattr(imported, name)):
            return load(purpose)
    return None
