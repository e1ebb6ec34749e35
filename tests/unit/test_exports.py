"""The public names of the package: each can be imported, is listed, and comes from one module."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import distcollect as dc

PUBLIC = sorted(set(dc.__all__) - {"__version__"})


def typed_names() -> dict[str, str]:
    """The names that type checkers see, and from which modules."""
    tree = ast.parse(Path(dc.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(i.module) for i in imports for alias in i.names}


def test_type_checkers_see_the_same_names() -> None:
    assert typed_names() == {**dc._MODULES, "__version__": "distcollect.version"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_can_be_imported_and_is_defined_where_the_table_says(name: str) -> None:
    value = getattr(dc, name)
    assert getattr(importlib.import_module(dc._MODULES[name]), name) is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__ == dc._MODULES[name]


def test_every_name_is_shown_and_imported() -> None:
    namespace: dict[str, object] = {}
    exec("from distcollect import *", namespace)
    help_text = pydoc.plain(pydoc.render_doc(dc))
    for name in PUBLIC:
        assert name in dir(dc)
        assert name in namespace
        assert name in help_text, name
    assert len(dc.__all__) == len(set(dc.__all__))
