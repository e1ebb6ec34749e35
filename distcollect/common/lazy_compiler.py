"""Lets TensorDict be imported without torch's compiler, which takes as long to import as torch.

TensorDict marks a few functions for the compiler when it is imported. To do that,
``torch.compiler.allow_in_graph`` and ``assume_constant_result`` import all of ``torch._dynamo``.
Most processes compile nothing. Here the marks are kept, and set when the compiler is imported.
TensorDict 0.9 imports parts of the compiler by name; with it, nothing is postponed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")  # functions of torch.compiler


def import_compiler_late() -> None:
    """Import the compiler when something needs it, if TensorDict is imported from now on."""
    if "tensordict" not in sys.modules and _COMPILER not in sys.modules:
        sys.meta_path.insert(0, _LateCompiler())


class _LateCompiler:
    """Finds the two modules as others would, and acts when they are executed."""

    def __init__(self) -> None:
        self._marks: list[Callable[[], object]] = []
        self._actions = {"tensordict": self._import_tensordict, _COMPILER: self._import_compiler}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :meth:`importlib.abc.MetaPathFinder.find_spec`."""
        action = self._actions.get(name)
        if action is None:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # Of this loader alone: a spec has its own.
            setattr(spec.loader, "exec_module", partial(action, spec.loader.exec_module))  # noqa: B010
        return spec

    def _import_tensordict(self, execute: Callable[[Any], None], module: ModuleType) -> None:
        import torch.compiler  # noqa: PLC0415 - not every process imports torch

        marks = {name: getattr(torch.compiler, name) for name in _MARKS}
        for name, mark in marks.items():
            setattr(torch.compiler, name, partial(self._mark_later, mark))
        try:
            execute(module)
        finally:
            for name, mark in marks.items():
                setattr(torch.compiler, name, mark)

    def _mark_later(self, mark: Callable[[Any], Any], function: Any) -> Any:
        if _COMPILER in sys.modules:
            return mark(function)
        self._marks.append(partial(mark, function))
        return function

    def _import_compiler(self, execute: Callable[[Any], None], module: ModuleType) -> None:
        execute(module)
        marks, self._marks = self._marks, []
        for mark in marks:
            mark()
