"""Calls other functions instead of some of torch's operations, in the threads that ask for it.

Torch looks up the function that carries out an operation by "dispatch keys": device, autograd and
others. The replacements are registered for a key that torch doesn't use, and this key is added for
the calling thread. So calls from C++ functions of torch, such as dropout, and from scripted code
come here too. All other operations pass on to the next key within C++, which costs nothing that can
be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from distcollect.errors import PolicyError

# Gets the operation, which is not replaced within, and the arguments of the call.
Replacement = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Torch keeps this key for the package torchdistx, which is no longer developed.
KEY_NAME = "DeferredInit"

_REGISTERED: list[Any] = []  # torch forgets a registration together with its Library


def redirect(replacements: Mapping[str, Replacement]) -> Callable[[], AbstractContextManager[Any]]:
    """Register replacements, by the names of the operations: "normal.Tensor_float".

    Returns:
        Makes a context in which the replacements are called; each can be entered once. On a torch
        without the key, or a function that this needs, it raises PolicyError.
    """
    native: Any = torch._C
    try:
        key = native._dispatch_key_parse(KEY_NAME)
        keys = native.DispatchKeySet(key)
        included, excluded = native._IncludeDispatchKeyGuard, native._ExcludeDispatchKeyGuard
    except (AttributeError, RuntimeError) as error:
        lacking = str(error)

        def refuse() -> AbstractContextManager[Any]:
            raise PolicyError(
                f"torch {torch.__version__} has no way to draw a policy's random numbers from one "
                f"seed for each env ({lacking}); use the torch version that constraints/tested.txt "
                "names, or don't set a seed"
            )

        return refuse

    def kernel_for(op: Any, replacement: Replacement) -> Callable[..., Any]:
        def torchs_own(*args: Any, **kwargs: Any) -> Any:
            with excluded(keys):
                return op(*args, **kwargs)

        def kernel(keys_of_call: Any, *args: Any, **kwargs: Any) -> Any:
            if _passes_on(args, kwargs):
                # The operation may come here again, from within vmap, with the data.
                return op.redispatch(keys_of_call - keys, *args, **kwargs)
            return replacement(torchs_own, args, kwargs)

        return kernel

    make: Any = Library  # torch declares no types
    others, ours = make("_", "IMPL"), make("aten", "IMPL")
    _REGISTERED.extend([others, ours])
    others.fallback(fallthrough_kernel, KEY_NAME)
    for name, replacement in replacements.items():
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        ours.impl(name, kernel_for(op, replacement), KEY_NAME, with_keyset=True)
    return lambda: included(key)


def _passes_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for what torch carries out: it has a generator or no data, or is captured."""
    if kwargs.get("generator") is not None:
        return True
    for arg in args[:2]:
        if isinstance(arg, Tensor):
            # A CUDA graph would hold the numbers of one frame, and give them again each time.
            captures = arg.is_cuda and torch.cuda.is_current_stream_capturing()
            return captures or not has_data(arg)
    return False


def has_data(tensor: Tensor) -> bool:
    """Return False for a stand-in, as while code is compiled or in vmap: it has no data."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except NotImplementedError:
        return False
