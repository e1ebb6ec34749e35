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


def typed_imports() -> dict[str, str]:
    """The public names that ``if TYPE_CHECKING`` imports, and from which modules."""
    tree = ast.parse(Path(dc.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            name = alias.asname or alias.name
            assert name not in found, f"{name} is imported twice"
            found[name] = node.module
    return found


def test_no_name_is_listed_twice() -> None:
    assert len(dc.__all__) == len(set(dc.__all__))


def test_the_three_lists_of_names_agree() -> None:
    """``__all__``, the table of modules, and the imports that type checkers see."""
    assert sorted(dc._MODULES) == PUBLIC
    assert typed_imports() == dc._MODULES


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_can_be_imported_and_is_defined_where_the_table_says(name: str) -> None:
    value = getattr(dc, name)
    assert getattr(importlib.import_module(dc._MODULES[name]), name) is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__ == dc._MODULES[name]


def test_dir_has_every_name() -> None:
    assert set(dc.__all__) <= set(dir(dc))


def test_help_has_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(dc))
    for name in PUBLIC:
        assert name in text, name


def test_star_imports_every_name() -> None:
    namespace: dict[str, object] = {}
    exec("from distcollect import *", namespace)
    assert set(dc.__all__) <= set(namespace)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Colector'"):
        dc.Colector  # noqa: B018
