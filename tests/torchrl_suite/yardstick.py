"""Runs TorchRL's own tests of its collectors with the collectors of this package in their place.

The checkout has to be of the release that is installed. Its tests are copied into a temporary
folder, and in the copy each import of a collector from ``torchrl.collectors`` that this package
has under the same name becomes an import from ``distcollect``. A statement of a test that reads or
sets a private member of a collector, such as ``assert collector._use_buffers``, is left out, and so
is what checks the values that it read, and the one test of what is inside of a state. Nothing else
is changed.

A test counts if it passes with TorchRL's own collectors here (``reference.txt`` has those, written
by ``judge.py --theirs``). Not counted are those that use no collector of ours, and those that
replace private parts of TorchRL (``excluded.txt`` has both, with the reason). Where a collector of
ours differs by design, its test counts as not passed, and ``differs.txt`` has the reason.

"""

from __future__ import annotations

import ast
import collections
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
REFERENCE, EXCLUDED, DIFFERS = (
    HERE / name for name in ("reference.txt", "excluded.txt", "differs.txt")
)
SELECTED = ("test_collectors.py", "test_distributed.py::TestRPCCollector")
NOT_THEIRS = "TorchRL's own collector does not pass it here"
# Of the tests that TorchRL passes with its own collectors.
HEAD = """\
| TorchRL's tests | TorchRL passes | not counted | counted | passed | share | by design | failed |
|---|---|---|---|---|---|---|---|"""
# A test that takes longer has failed: TorchRL's own wait for 200 s at most.
LIMIT_S = 240


def swapped(source: str, ours: frozenset[str]) -> str:
    """Python code whose imports of collectors from TorchRL are imports from this package.

    Args:
        source: the code.
        ours: the names that this package has.
    """
    lines = source.splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(source)) if _imports_collectors(node)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        groups: dict[str, list[str]] = {"distcollect": [], str(node.module): []}
        for name in node.names:
            text = name.name if name.asname is None else f"{name.name} as {name.asname}"
            groups["distcollect" if name.name in ours else str(node.module)].append(text)
        imports = [f"from {module} import {', '.join(n)}" for module, n in groups.items() if n]
        lines[node.lineno - 1 : node.end_lineno] = [
            " " * node.col_offset + "; ".join(imports) + "\n"
        ]
    return "".join(lines)


def _imports_collectors(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchrl.collectors")


_PRIVATE_OF = frozenset({"collector", "ccollector", "c"})
_SIMPLE = (ast.Assert, ast.Assign, ast.Expr)


def without_private_members(source: str) -> tuple[str, int]:
    """Tests without the statements that need a private member of a collector, and their number."""
    lines = source.splitlines(keepends=True)
    num_left_out = 0
    for test in ast.walk(ast.parse(source)):
        if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
            continue
        statements = [node for node in ast.walk(test) if isinstance(node, _SIMPLE)]
        unknown: set[str] = set()
        for node in sorted(statements, key=lambda node: node.lineno):
            inner = list(ast.walk(node))
            if not any(_is_private(part) or _reads(part, unknown) for part in inner):
                continue
            if isinstance(node, ast.Assign):
                unknown |= {part.id for part in inner if _is_assigned(part)}
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [f"{indent}pass\n"] + ["\n"] * (
                node.end_lineno - node.lineno
            )
            num_left_out += 1
    return "".join(lines), num_left_out


def _is_private(node: ast.AST) -> bool:
    """Whether it is a private member of a collector, or a key inside of its state."""
    if isinstance(node, ast.Constant):
        return node.value == "traj_pool"
    is_member = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_member and node.attr.startswith("_") and node.value.id in _PRIVATE_OF


def _reads(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def our_names() -> frozenset[str]:
    """The names that this package exports, in the tree that this script is in."""
    code = "import distcollect, json; print(json.dumps(distcollect.__all__))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=plain_environment(), check=True, capture_output=True, text=True, cwd="/"
    )
    return frozenset(json.loads(result.stdout))


def plain_environment(**more: str) -> dict[str, str]:
    """This environment, for a process that imports this tree."""
    path = os.pathsep.join([str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    # Each process would compile this package again, unlike those that are installed.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def copy_tests(checkout: Path, folder: Path, ours: frozenset[str]) -> int:
    """Copy the tests of a checkout to ``folder``, with the imports of ``ours`` swapped.

    Returns:
        The number of statements that are left out, as they need a private member of a collector.
    """
    num_left_out = 0
    for name in ("conftest.py", "test_collectors.py", "test_distributed.py"):
        source = (checkout / "test" / name).read_text()
        if name.startswith("test_"):
            source = swapped(source, ours)
        if name == "test_collectors.py" and ours:
            source, num_left_out = without_private_members(source)
        (folder / name).write_text(source)
    shutil.copy(checkout / "pytest.ini", folder)
    return num_left_out


def selected_ids(folder: Path, patterns: Sequence[str]) -> list[str]:
    """The ids of all tests in ``folder`` that match one of the patterns; without patterns all."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *SELECTED],
        cwd=folder,
        env=plain_environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    ids = [line for line in result.stdout.splitlines() if "::" in line and " " not in line[:20]]
    if not ids:
        raise SystemExit(f"no tests were found:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return [i for i in ids if not patterns or any(pattern in i for pattern in patterns)]


def run_tests(folder: Path, ids: list[str]) -> dict[str, dict[str, Any]]:
    """Run tests in one process after the other: one that hangs or ends it costs only itself.

    Returns:
        Outcome, seconds and reason of each test, by id.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    while remaining := [i for i in ids if i not in outcomes]:
        started = remaining[0]
        for line in _run_pytest(folder, remaining):
            outcome = json.loads(line)
            if outcome["outcome"] == "started":
                started = outcome["id"]
            elif outcome["id"] not in outcomes or outcome["outcome"] == "failed":
                outcomes[outcome["id"]] = outcome
        # What began, and did not end, ended the process.
        lost = {"outcome": "failed", "seconds": LIMIT_S, "reason": "it hung, or ended the process"}
        outcomes.setdefault(started, {"id": started, **lost})
    return outcomes


def _run_pytest(folder: Path, ids: list[str]) -> list[str]:
    """Run tests in one process; return the lines of ``outcomes.py``."""
    file, listed = folder / "outcomes.jsonl", folder / "ids.txt"
    file.write_text("")
    listed.write_text("\n".join(ids))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-p", "outcomes", "--timeout", str(LIMIT_S), "--timeout-method", "signal",
        f"@{listed}",
    ]  # fmt: skip
    with (folder / "pytest.log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=plain_environment(OUTCOMES=str(file)),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None:
            time.sleep(1)
            if time.time() - file.stat().st_mtime > LIMIT_S + 30:
                os.killpg(process.pid, 9)
    return file.read_text().splitlines()


def read_list(path: Path) -> Iterator[tuple[str, str]]:
    """The entries of a list: an id or a pattern, and what follows it on the line."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            first, _, rest = line.partition("  ")
            yield first, rest.strip()


def excluded_for(test_id: str, exclusions: list[tuple[str, str]]) -> str | None:
    """Why a test is excluded; None if it is not."""
    plain = test_id.replace("[", "(").replace("]", ")")
    for pattern, reason in exclusions:
        plain_pattern = pattern.replace("[", "(").replace("]", ")")
        if fnmatch.fnmatch(plain, plain_pattern) or fnmatch.fnmatch(plain, plain_pattern + "(*"):
            return reason
    return None


# A test's id may hold the names of the classes that it runs with.
THEIR_NAMES = {
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "aSyncDataCollector": "AsyncCollector",
    "RPCDataCollector": "RPCCollector",
}


def canonical(test_id: str) -> str:
    """A test's id with TorchRL's names of the classes."""
    for ours, theirs in THEIR_NAMES.items():
        test_id = test_id.replace(ours, theirs)
    return test_id


@dataclass(frozen=True)
class Judged:
    """What became of the tests that were chosen.

    Attributes:
        reasons: by id, why a test doesn't count; None if it does.
        outcomes: outcome, seconds and reason of each test that ran, by id.
        num_left_out: number of statements that were left out of the tests.
    """

    reasons: dict[str, str | None]
    outcomes: dict[str, dict[str, Any]]
    num_left_out: int

    def row(self, name: str) -> str:
        """A row of the table that :data:`HEAD` begins, for the tests whose ids contain ``name``."""
        known = {i: r for i, r in self.reasons.items() if name in i and r != NOT_THEIRS}
        counted = [i for i, reason in known.items() if reason is None and i in self.outcomes]
        failed = [i for i in counted if self.outcomes[i]["outcome"] != "passed"]
        differs = list(read_list(DIFFERS))
        meant = [i for i in failed if excluded_for(canonical(i), differs)]
        passed = len(counted) - len(failed)
        share = f"{passed / len(counted):.1%}" if counted else "-"
        figures = (
            len(known), len(known) - len(counted), len(counted), passed, share, len(meant),
            len(failed) - len(meant),
        )  # fmt: skip
        return f"| {name} | {' | '.join(map(str, figures))} |"


def judge(checkout: Path, patterns: Sequence[str] = (), *, theirs: bool = False) -> Judged:
    """Run the tests whose ids contain one of the patterns; without patterns all."""
    reference = dict(read_list(REFERENCE))
    recorded = {i.partition("::")[0] for i in reference}
    exclusions = list(read_list(EXCLUDED))
    with tempfile.TemporaryDirectory(prefix="yardstick-") as name:
        folder = Path(name)
        num_left_out = copy_tests(checkout, folder, frozenset() if theirs else our_names())
        ids = selected_ids(folder, patterns)
        reasons = {i: excluded_for(canonical(i), exclusions) for i in ids}
        for i in ids:
            # TestRPCCollector, all of which TorchRL passes on an idle host, is not in the list.
            is_unknown = canonical(i) not in reference and i.partition("::")[0] in recorded
            if not theirs and is_unknown:
                reasons[i] = NOT_THEIRS
        chosen = [i for i in ids if theirs or reasons[i] is None]
        outcomes = run_tests(folder, chosen)
    return Judged(reasons, outcomes, num_left_out)


def write_reference(outcomes: dict[str, dict[str, Any]], *, merge: bool) -> None:
    """Write the list of the tests that TorchRL's own collectors pass."""
    known = dict(read_list(REFERENCE)) if merge else {}
    for i, outcome in outcomes.items():
        known.pop(i, None)
        if outcome["outcome"] == "passed":
            known[i] = f"{outcome['seconds']}"
    head = "# The tests that TorchRL's own collectors pass, with the seconds that each took.\n"
    REFERENCE.write_text(head + "".join(f"{i}  {s}\n" for i, s in known.items()))


def report(judged: Judged) -> None:
    """Print what failed, with its traceback, and why tests don't count."""
    differs = list(read_list(DIFFERS))
    for i, outcome in judged.outcomes.items():
        if judged.reasons[i] is None and outcome["outcome"] != "passed":
            meant = excluded_for(canonical(i), differs)
            what = "differs" if meant else outcome["outcome"]
            print(f"{what}: {i}\n    {meant or outcome['reason']}")
    counts = collections.Counter(reason for reason in judged.reasons.values() if reason is not None)
    for reason, count in counts.most_common():
        print(f"not counted: {count:4}  {reason}")
    print(f"statements left out, as they need a private member: {judged.num_left_out}")
