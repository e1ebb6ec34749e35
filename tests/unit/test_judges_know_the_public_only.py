"""The judges use what users may use, so that they stay the same when the inside changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import TESTS

import distcollect as dc

# Public methods of named tuples.
OF_TUPLES = {"_asdict", "_fields", "_replace"}
FILES = [*TESTS.glob("judges/*.py"), *TESTS.glob("helpers/judge_*.py")]


def private_parts(tree: ast.AST) -> Iterator[str]:
    """What a file uses of distcollect that is not public, and private attributes of objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("distcollect."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distcollect"):
            public = node.module == "distcollect" and all(a.name in dc.__all__ for a in node.names)
            if not public:
                yield f"from {node.module} import {', '.join(a.name for a in node.names)}"
        elif isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_itself and node.attr not in OF_TUPLES:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_judges_use_only_what_is_public(file: Path) -> None:
    assert not list(private_parts(ast.parse(file.read_text())))


def test_a_private_part_is_found() -> None:
    for source in (
        "import distcollect.pool.pool",
        "from distcollect.pool import pool",
        "from distcollect import _MODULES",
        "collector._backend",
    ):
        assert list(private_parts(ast.parse(source))), source
    assert not list(private_parts(ast.parse("import distcollect as dc\nself._log, dc.__all__")))
