"""What pyproject.toml allows is what was run: see the files in constraints/."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from distcollect.version import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
# Extras that hold packages which the package itself works with, not tools.
EXTRAS = ("torchrl",)


def pinned(name: str) -> dict[str, str]:
    """Packages and versions in a file; they may be in a comment."""
    text = (ROOT / "constraints" / f"{name}.txt").read_text()
    return dict(re.findall(r"^(?:# +)?([\w-]+)==([\w.]+)", text, re.MULTILINE))


def allowed() -> dict[str, tuple[str, str]]:
    """The lowest version of each dependency, and the first one that is too new, or ""."""
    lists = [re.search(r"^dependencies = (\[.*?^\])", PROJECT, re.MULTILINE | re.DOTALL)]
    lists += [re.search(rf"^{extra} = (\[.*?\])$", PROJECT, re.MULTILINE) for extra in EXTRAS]
    found = {}
    for each in lists:
        assert each is not None
        for name, low, high in re.findall(r'"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?"', each[1]):
            found[name] = (low, high)
    return found


def numbers(version: str) -> list[int]:
    parts = [int(part) for part in version.split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    with_torchrl = pinned("lowest-torchrl")
    lowest = {**with_torchrl, **pinned("lowest")}
    assert {"torch", "tensordict", "numpy", "torchrl"} <= allowed().keys()
    assert {name: numbers(low) for name, (low, _) in allowed().items()} == {
        name: numbers(lowest[name]) for name in allowed()
    }
    different = {name for name in lowest if with_torchrl[name] != lowest[name]}
    assert different == {"tensordict"}


def test_versions_that_errors_advise_are_those_that_are_tested() -> None:
    tested = pinned("tested")
    assert {name: tested[name] for name in TESTED} == TESTED


@pytest.mark.parametrize("name", ["lowest-torchrl", "tested", "newest"])
def test_versions_are_allowed(name: str) -> None:
    versions = pinned(name)
    for package, (low, high) in allowed().items():
        version = numbers(versions[package])
        assert numbers(low) <= version
        assert not high or version < numbers(high)


def test_the_newest_versions_are_not_pinned() -> None:
    text = (ROOT / "constraints" / "newest.txt").read_text()
    assert all(line.startswith("#") for line in text.splitlines())


def test_pythons_are_those_that_are_claimed() -> None:
    """``requires-python`` is the lowest of the classifiers, and README says the same."""
    lowest = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)
    assert lowest is not None
    claimed = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', PROJECT)
    assert lowest[1] == min(claimed, key=numbers)
    readme = (ROOT / "README.md").read_text()
    newest = max(claimed, key=numbers)
    assert f"Python {lowest[1]} to {newest}" in readme


def test_wheels_for_a_gpu_have_the_versions_that_are_tested() -> None:
    wanted = runpy.run_path(str(ROOT / "tests" / "gpu" / "run"))["wheels_to_get"]()
    tested = pinned("tested")
    for name in ("tensordict", "gymnasium", "torchrl", "pytest"):
        assert f"{name}=={tested[name]}" in wanted
    assert not [name for name in wanted if name.startswith(("torch=", "numpy"))]
