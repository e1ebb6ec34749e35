"""Gives a collector the signature and the texts of its options, and TorchRL's names beside them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from distcollect.common import signals
from distcollect.common.checks import plain
from distcollect.errors import ArgumentError, ArgumentTypeError, DistCollectError
from distcollect.integrations import load

_P = ParamSpec("_P")
_Options = TypeVar("_Options")


def takes(
    options: Callable[_P, _Options],
) -> Callable[[Callable[[Any, _Options], None]], Callable[Concatenate[Any, _P], None]]:
    """Have an ``__init__`` that takes ``options`` be called with the fields of that class.

    Type checkers and editors see the fields as parameters; ``help()`` also shows their texts.
    TorchRL's names for the arguments are accepted too.

    Args:
        options: one of the classes in :mod:`.options`.
    """
    kind = cast("type[_Options]", options)
    signature = inspect.signature(kind)

    def decorate(init: Callable[[Any, _Options], None]) -> Callable[Concatenate[Any, _P], None]:
        @functools.wraps(init)
        def wrapper(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                init(self, _read(kind, signature, type(self).__name__, args, kwargs))
            except DistCollectError as error:
                raise signals.cut(error) from error.__cause__

        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [this, *signature.parameters.values()]
        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        # Tools that unwrap functions, such as mkdocstrings, would show `init` with its `options`.
        del wrapper.__wrapped__
        if init.__doc__:  # Python has left it out if it was started with -OO
            wrapper.__doc__ = _with_arguments(init.__doc__, _texts(kind), signature)
        return wrapper

    return decorate


def _read(
    kind: type[_Options],
    signature: inspect.Signature,
    collector: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> _Options:
    args = [plain(value) for value in args]
    kwargs = {name: plain(value) for name, value in kwargs.items()}
    own_names = signature.parameters.keys()
    for fixed in fields(cast("Any", kind)):
        if not fixed.init and fixed.name in kwargs:
            if fixed.name == "sync" and kwargs["sync"] in (None, fixed.default):
                continue  # what the class does anyway
            raise ArgumentError(f"{collector} has no {fixed.name}: use RPCDataCollector to choose")
    own = {name: value for name, value in kwargs.items() if name in own_names}
    others = {
        name: value for name, value in kwargs.items() if name not in own_names and name != "sync"
    }
    try:
        given = signature.bind_partial(*args, **own).arguments
        arguments = load("names of arguments")(others, given, own_names)
        signature.bind(**arguments)
    except TypeError as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentTypeError(f"{collector}(): {error}") from None
    return kind(**arguments)


def _texts(kind: type) -> dict[str, str]:
    """The text of each field of an options class: the most derived class's own."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
        for entry in re.split(r"^    (?=\w)", attributes, flags=re.MULTILINE)[1:]:
            name, _, text = entry.partition(": ")
            texts[name] = text.strip()
    return texts


def _with_arguments(doc: str, texts: Mapping[str, str], signature: inspect.Signature) -> str:
    """A docstring with a section of the arguments, before that of the errors."""
    head, raises, errors = inspect.cleandoc(doc).partition("Raises:")
    entries = "".join(f"    {name}: {texts[name]}\n" for name in signature.parameters)
    return f"{head.rstrip()}\n\nArgs:\n{entries}\n{raises}{errors}".rstrip()
