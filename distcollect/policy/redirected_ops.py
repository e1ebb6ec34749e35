"""Calls other functions instead of some of torch's operations, in the threads that ask for it.

Torch looks up the function that carries out an operation by "dispatch keys": device, autograd and
others. :class:`ByKey` registers the replacements for a key that torch doesn't use, and adds this
key for the calling thread. So calls from C++ functions of torch, such as dropout, and from scripted
code come here too. All other operations pass on to the next key within C++, which costs nothing
that can be measured.

On a torch without that key, or without the private functions that this needs, :class:`ByMode` is
used: in the calling thread all operations come to Python first. The results are the same, but each
operation takes several microseconds more, and compiled code runs uncompiled.
"""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)


class ByKey:
    """Replaces operations for a dispatch key of their own.

    Raises:
        AttributeError, RuntimeError: this torch lacks the key, or a function that this needs.
    """

    def __init__(self, replacements: Mapping[str, Replacement]) -> None:
        """Register the replacements, by the names of the operations: "normal.Tensor_float"."""
        native: Any = torch._C
        self._key = native._dispatch_key_parse(KEY_NAME)
        self._included, self._excluded = (
            native._IncludeDispatchKeyGuard,
            native._ExcludeDispatchKeyGuard,
        )
        self._keys = native.DispatchKeySet(self._key)
        make: Any = Library  # torch declares no types
        self._libraries = others, ours = make("_", "IMPL"), make("aten", "IMPL")
        others.fallback(fallthrough_kernel, KEY_NAME)
        for name, replacement in replacements.items():
            ours.impl(name, self._kernel(operation(name), replacement), KEY_NAME, with_keyset=True)

    def __call__(self) -> AbstractContextManager[Any]:
        """A context in which the replacements are called; it can be entered once."""
        context: AbstractContextManager[Any] = self._included(self._key)
        return context

    def _kernel(self, op: Any, replacement: Replacement) -> Callable[..., Any]:
        excluded, keys_of_this = self._excluded, self._keys

        def torchs_own(*args: Any, **kwargs: Any) -> Any:
            with excluded(keys_of_this):
                return op(*args, **kwargs)

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if _passes_on(args, kwargs):
                # The operation may come here again, from within vmap, with the data.
                return op.redispatch(keys - keys_of_this, *args, **kwargs)
            return replacement(torchs_own, args, kwargs)

        return kernel


class ByMode:
    """Replaces operations by looking at each one that is called.

    Raises:
        ImportError: this torch lacks what this needs.
    """

    def __init__(
        self, replacements: Mapping[str, Replacement], of_new: Mapping[str, Replacement]
    ) -> None:
        """Take the replacements.

        Args:
            replacements: by the names of the operations.
            of_new: of operations that make a tensor, and call one of the others within C++, where a
                mode doesn't see it. By their names without overload: "randint".
        """
        from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415 - may be missing

        found = {operation(name): replacement for name, replacement in replacements.items()}
        for name, replacement in of_new.items():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                found.setdefault(getattr(packet, overload), replacement)

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch declares no types
            def __torch_dispatch__(
                self, op: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                kwargs = kwargs or {}
                if (replacement := found.get(op)) is not None:
                    passes_on = _passes_on(args, kwargs)
                    return op(*args, **kwargs) if passes_on else replacement(op, args, kwargs)
                # In inference mode, operations that consist of others come here whole.
                with self:
                    result = op.decompose(*args, **kwargs)
                return op(*args, **kwargs) if result is NotImplemented else result

        self._make_mode: Any = Mode

    def __call__(self) -> AbstractContextManager[Any]:
        """A context in which the replacements are called; it can be entered once."""
        context: AbstractContextManager[Any] = self._make_mode()
        return context


def _passes_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch has to carry out a call: it has a generator or no data, or is captured."""
    if kwargs.get("generator") is not None:
        return True
    for arg in args[:2]:
        if isinstance(arg, Tensor):
            # A CUDA graph would hold the numbers of one frame, and give them again each time.
            captures = arg.is_cuda and torch.cuda.is_current_stream_capturing()
            return captures or not has_data(arg)
    return False


def has_data(tensor: Tensor) -> bool:
    """Whether the tensor's data is there: no stand-in, as while code is compiled, nor in vmap."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except NotImplementedError:
        return False


def operation(name: str) -> Any:
    """An operation of torch by its name: "normal.Tensor_float"."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def redirect(
    replacements: Mapping[str, Replacement], of_new: Mapping[str, Replacement]
) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes contexts in which operations are replaced; see :class:`ByMode`.

    It raises PolicyError if this torch has no way to do that.
    """
    try:
        return ByKey(replacements)
    except (AttributeError, RuntimeError) as error:
        log.debug("torch %s has no dispatch key that is free: %s", torch.__version__, error)
    try:
        return ByMode(replacements, of_new)
    except ImportError as error:
        lacking = str(error)

    def refuse() -> AbstractContextManager[Any]:
        raise PolicyError(
            f"torch {torch.__version__} has no way to draw a policy's random numbers from one seed "
            f"for each env ({lacking}); use the torch version that constraints/tested.txt names, "
            "or don't set a seed"
        )

    return refuse
