"""The package stays small enough to be read: its lines of code are counted, and have a limit.

A change that needs more than is left raises the limit here, and says in its commit what the lines
are for and what they replace.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "distcollect"
LONGEST_MODULE = 450
LIMITS = {PACKAGE: 29_601, PACKAGE / "commands": 2_009, ROOT / "tests": 39_912}
LIMITS |= {PACKAGE / "net": 1_413, PACKAGE / "transport": 1_183}


def code_lines(path: Path) -> int:
    """Number of lines that are neither blank nor part of a comment or a docstring."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        may_have_one = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, may_have_one) and ast.get_docstring(node, clean=False) is not None:
            text_of_it = node.body[0]
            documented.update(range(text_of_it.lineno, (text_of_it.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), 1)
    )


@pytest.mark.parametrize("folder", LIMITS, ids=lambda folder: folder.name)
def test_the_code_does_not_grow(folder: Path) -> None:
    lines = sum(map(code_lines, folder.rglob("*.py")))
    assert lines <= LIMITS[folder], f"{folder.name} has {lines} lines of code"


def test_no_module_is_too_long() -> None:
    too_long = {
        str(path): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := code_lines(path)) > LONGEST_MODULE
    }
    assert not too_long
