"""Answers to a misspelled name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection
from typing import Any, TypeVar

from distcollect.common.checks import plain
from distcollect.errors import ArgumentTypeError

T = TypeVar("T")


def unknown_argument(name: str, known: Collection[str]) -> str:
    """Return the message for an argument that doesn't exist: first the name that may be meant."""
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no argument {name!r}{suggestion}; there are: {', '.join(sorted(known))}"


def suggests_names(kind: type[T]) -> type[T]:
    """Have a dataclass raise :class:`ArgumentTypeError` for an unknown field, with a suggestion.

    It also takes scalars of numpy and torch as numbers.
    """
    init = kind.__init__
    known = [each.name for each in dataclasses.fields(kind) if each.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(f"{kind.__name__}: {unknown_argument(name, known)}")
        init(self, *map(plain, args), **{name: plain(value) for name, value in kwargs.items()})

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind
