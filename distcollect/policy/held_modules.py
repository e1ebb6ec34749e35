"""Finds the modules that a callable computes with: those of bound methods, closures and so on."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import getattr_static
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

_MOST_SEARCHED = 100_000  # objects; a callable may refer to anything, for example a whole dataset
_NEVER_SEARCHED = (type, ModuleType, str, bytes, int, float, torch.Tensor, TensorDictBase)
_LIBRARIES = frozenset({"torch", "torchrl", "tensordict", "numpy", "gymnasium"})


def held_modules(policy: object) -> dict[str, nn.Module]:
    """Return the modules with weights that ``policy`` computes with, by where it has them.

    It is one itself, or it is a callable that refers to some: a bound method, a ``partial``, a
    function that uses variables of a closure or of its module, an object with attributes or with a
    ``__call__`` that is such a function, a TensorDictModule that wraps one of these. Attributes,
    lists and dicts are searched as deep as they go. Modules within one that was found are left out,
    and so are TorchRL's envs.
    """
    found: dict[str, nn.Module] = {}
    seen: dict[int, object] = {}  # the objects themselves, so that their ids stay valid
    to_search = deque([("", policy)])
    while to_search and len(seen) < _MOST_SEARCHED:
        name, thing = to_search.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, nn.Module):
            if all(kind.__name__ != "EnvBase" for kind in type(thing).__mro__):
                found[_free_name(name or "policy", found)] = thing
                # TensorDictModules may call what is no module.
                inner = (part for part in thing.modules() if isinstance(part, TensorDictModule))
                to_search.extend(
                    (name, part.module) for part in inner if not isinstance(part.module, nn.Module)
                )
        elif not isinstance(thing, _NEVER_SEARCHED):
            to_search.extend((f"{name}_{part}".strip("_"), inner) for part, inner in _parts(thing))
    within = {id(part) for each in found.values() for part in each.modules() if part is not each}
    return {
        name: module
        for name, module in found.items()
        if id(module) not in within
        and any(True for _ in chain(module.parameters(), module.buffers()))
    }


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return ``name``, or one like it that a part of a ModuleDict can have and is not taken."""
    name = name.replace(".", "_")
    while name in taken or hasattr(nn.ModuleDict, name):
        name += "_"
    return name


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    """Return what an object that is no module refers to, each part with its name."""
    if isinstance(thing, MethodType):
        yield "", thing.__self__
        yield "", thing.__func__
    elif isinstance(thing, partial):
        yield "", thing.func
        yield from _parts(thing.args)
        yield from _parts(thing.keywords)
    elif isinstance(thing, FunctionType):
        yield from _variables(thing)
    elif isinstance(thing, Mapping):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | deque):
        yield from ((str(index), value) for index, value in enumerate(thing))
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            yield slot, getattr(thing, slot, None)
    if type(thing).__module__.partition(".")[0] not in _LIBRARIES:
        yield from _of_class(thing)


def _of_class(thing: object) -> Iterator[tuple[str, object]]:
    """Return the modules among the attributes of an object's class, and its ``__call__``."""
    for kind in type(thing).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, nn.Module) and getattr_static(thing, name, None) is value:
                yield name, value
    if isinstance(call := getattr_static(type(thing), "__call__", None), FunctionType):
        yield "", call


def _variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Return a function's defaults, and the variables of its closure and module that it uses."""
    yield from _parts(function.__defaults__ or ())
    yield from _parts(function.__kwdefaults__ or {})
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        # Functions of other modules, such as torch's, are not the user's.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            yield name, value


def _global_names(code: CodeType) -> dict[str, None]:
    """Return the names of the global variables that code reads, in the order of their first use."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _global_names(inner)
    return names
