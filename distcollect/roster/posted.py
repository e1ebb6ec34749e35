"""Methods that may be called on any thread, and run on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Posts(Protocol):
    """An object that belongs to one thread.

    Attributes:
        post: has that thread call a function.
    """

    post: Callable[[Callable[[], None]], Any]


T = TypeVar("T", bound=Posts)


def posted(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Let a method be called on any thread: the one that the object belongs to runs it."""

    def post(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.post(partial(method, self, *args, **kwargs))

    post.__doc__ = method.__doc__
    return post
