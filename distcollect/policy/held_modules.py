"""Finds the modules that a callable computes with: those of bound methods, closures and so on."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from inspect import getattr_static
from itertools import chain
from types import (
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from distcollect.errors import users_errors

_MOST_SEARCHED = 100_000  # objects; a callable may refer to anything, for example a whole dataset
_NEVER_SEARCHED = (ModuleType, str, bytes, int, float, torch.Tensor, TensorDictBase)
# The code of these computes with no module that it is not given.
_LIBRARIES = frozenset({"torch", "torchrl", "tensordict", "numpy", "gymnasium", "distcollect"})
_LIBRARIES |= sys.stdlib_module_names
_CALLED = ("__call__", "forward", "initial_state")  # of an object, whoever holds it
_FUNCTION_OF = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}
_FUNCTION_OF[cached_property] = "func"


def held_modules(policy: object) -> dict[str, nn.Module]:
    """Return the modules with weights that ``policy`` computes with, by where it has them.

    It is one itself, or it is a callable that refers to some: a bound method, a ``partial``, a
    function, an object with attributes, a TensorDictModule that wraps one of these. Attributes,
    lists and dicts are searched as deep as they go. Of code, also that of a module, what counts is
    what it reads by name: variables of a closure or of a file, attributes of an object or of its
    class, and the same of what it calls, in whichever file. Not found is what is named at run time
    only, as by ``getattr``. Modules within one that was found are left out, and so are TorchRL's
    envs.
    """
    found: dict[str, nn.Module] = {}
    seen: dict[int, object] = {}  # the objects themselves, so that their ids stay valid
    read = dict.fromkeys(_CALLED)  # the attributes that code reads
    within: set[int] = set()  # ids of the parts of those that were found
    of_kind: dict[type, list[object]] = {}  # classes of the user's, and objects of them
    to_search = deque([("", policy)])
    while to_search and len(seen) < _MOST_SEARCHED:
        name, thing = to_search.popleft()
        is_env = any(kind.__name__ == "EnvBase" for kind in type(thing).__mro__)
        if id(thing) not in seen and not is_env:
            seen[id(thing)] = thing
            parts: list[object] = [thing]
            try:
                if isinstance(thing, nn.Module):
                    found[_free_name(name or "policy", found)] = thing
                    parts = list(thing.modules())
                    within.update(id(part) for part in parts[1:])
                    # TensorDictModules may call what is no module.
                    inner = [part.module for part in parts if isinstance(part, TensorDictModule)]
                    to_search.extend((name, each) for each in inner if id(each) not in within)
                elif not isinstance(thing, (type, *_NEVER_SEARCHED)):
                    if isinstance(thing, FunctionType):
                        read |= _reads_of(thing).attributes
                    more = _parts(thing)
                    to_search.extend((f"{name}_{key}".strip("_"), each) for key, each in more)
            except users_errors():  # it stands for something that is not there yet
                parts = []
            for part in parts:
                kind = part if isinstance(part, type) else type(part)
                if not _is_of_library(kind.__module__):
                    of_kind.setdefault(kind, []).append(part)
        if not to_search:
            members = _members(of_kind, read)
            to_search.extend((key, each) for key, each in members if id(each) not in seen)
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
        yield from (("", thing.__self__), ("", thing.__func__))
    elif isinstance(thing, partial):
        yield from (("", thing.func), ("", thing.args), ("", thing.keywords))
    elif isinstance(thing, FunctionType):
        yield from _variables(thing)
    elif isinstance(thing, dict | MappingProxyType):
        # Another mapping has its values in attributes; its own items() may raise or compute.
        items = dict.items(thing) if isinstance(thing, dict) else thing.items()
        yield from ((str(key), value) for key, value in items)
    elif isinstance(thing, list | tuple | deque):
        yield from ((str(index), value) for index, value in enumerate(thing))
    yield from getattr(thing, "__dict__", {}).items()
    for attributes in (vars(kind) for kind in type(thing).__mro__ if "__slots__" in vars(kind)):
        for name, slot in attributes.items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has no value
                    yield name, slot.__get__(thing)


def _members(
    of_kind: Mapping[type, list[object]], names: Mapping[str, None]
) -> Iterator[tuple[str, object]]:
    """Return what classes, and the modules among their objects, have under one of these names."""
    for kind, things in of_kind.items():
        for base in kind.__mro__:
            attributes = {} if _is_of_library(base.__module__) else vars(base)
            for name in (name for name in attributes if name in names):
                value = attributes[name]
                function = getattr(value, _FUNCTION_OF.get(type(value), ""), value)
                if isinstance(function, FunctionType):
                    yield "", function
                elif any(getattr_static(thing, name, None) is value for thing in things):
                    yield name, value
        for thing in things if issubclass(kind, nn.Module) else ():
            attributes = {} if isinstance(thing, type) else vars(thing)
            yield from (each for each in attributes.items() if each[0] in names)


@lru_cache(10_000)
def _is_of_library(module: str | None) -> bool:
    """Return True if the code of a module, by its name, is not searched."""
    return str(module).partition(".")[0] in _LIBRARIES


def _variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Return a function's defaults, and the variables of its closure and of files that it uses."""
    yield from (("", function.__defaults__), ("", function.__kwdefaults__))
    variables, reads = function.__globals__, _reads_of(function)
    package = f"{variables.get('__package__')}."
    files = [sys.modules.get(at + name) for name in reads.imports for at in ("", package)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
            files.append(cell.cell_contents)
    for first, *attributes in reads.variables:
        name, value = first, variables.get(first)
        for attribute in attributes:
            if not _is_searched_file(value):
                break
            name, value = attribute, vars(value).get(attribute)
        yield name, value
    for file in files:
        inner = vars(file) if _is_searched_file(file) else {}
        for name in (name for name in reads.attributes if name in inner):
            yield name, inner[name]
            if isinstance(inner[name], ModuleType) and inner[name] not in files:
                files.append(inner[name])


def _is_searched_file(value: object) -> bool:
    return isinstance(value, ModuleType) and not _is_of_library(value.__name__)


def _reads_of(function: FunctionType) -> _Reads:
    is_searched = not _is_of_library(function.__globals__.get("__name__"))
    return _reads(function.__code__) if is_searched else _Reads({}, {}, {})


class _Reads(NamedTuple):
    """What code reads by name, in the order of the first use.

    Attributes:
        variables: global variables, each with the names of the attributes that are read of it.
        attributes: names of attributes of anything.
        imports: names of modules that it imports.
    """

    variables: dict[tuple[str, ...], None]
    attributes: dict[str, None]
    imports: dict[str, None]


@lru_cache(10_000)
def _reads(code: CodeType) -> _Reads:
    reads = _Reads({}, {}, {})
    path: tuple[str, ...] = ()  # that is being read
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation == "EXTENDED_ARG":
            continue
        goes_on = path and operation in ("LOAD_ATTR", "LOAD_METHOD")
        if not goes_on and path:
            reads.variables[path] = None
        path = (*path, name) if goes_on else (name,) if operation == "LOAD_GLOBAL" else ()
        if operation == "IMPORT_NAME":
            reads.imports[name] = None
        elif instruction.opcode in dis.hasname and operation != "LOAD_GLOBAL":
            reads.attributes[name] = None
    for inner in (_reads(each) for each in code.co_consts if isinstance(each, CodeType)):
        reads.variables.update(inner.variables)
        reads.attributes.update(inner.attributes)
        reads.imports.update(inner.imports)
    return reads
