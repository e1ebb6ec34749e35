"""Runs TorchRL's own tests of its collectors with the collectors of this package in their place.

::

    git clone --branch v0.14.0 https://github.com/pytorch/rl /tmp/rl
    python tests/torchrl_suite/yardstick.py /tmp/rl               # all, with ours
    python tests/torchrl_suite/yardstick.py /tmp/rl TestRPCCollector  # one class
    python tests/torchrl_suite/yardstick.py /tmp/rl --theirs       # with TorchRL's: the reference

The checkout has to be of the release that is installed. Its tests are copied into a temporary
folder, and in the copy each import of a collector from ``torchrl.collectors`` that this package
has under the same name becomes an import from ``distcollect``. Nothing else is changed.

A test is *applicable* if it passes with TorchRL's own collectors here (``reference.txt`` has those,
written by ``--theirs``), and tests no part of TorchRL that is private or has no counterpart
(``excluded.txt`` has those, with the reason). The script prints the failures, how many of the
applicable tests pass, for each class, and the reasons of the exclusions. For failures that are
meant, ``differs.txt`` has the reason.

TorchRL's tests need ``pip install psutil``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
REFERENCE, EXCLUDED, DIFFERS = (
    HERE / name for name in ("reference.txt", "excluded.txt", "differs.txt")
)
SELECTED = ("test_collectors.py", "test_distributed.py::TestRPCCollector")
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


def copy_tests(checkout: Path, folder: Path, ours: frozenset[str]) -> None:
    """Copy the tests of a checkout to ``folder``, with the imports of ``ours`` swapped."""
    for name in ("conftest.py", "test_collectors.py", "test_distributed.py"):
        source = (checkout / "test" / name).read_text()
        (folder / name).write_text(swapped(source, ours) if name.startswith("test_") else source)
    shutil.copy(checkout / "pytest.ini", folder)


def selected_ids(folder: Path, patterns: list[str]) -> list[str]:
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


class Run:
    """Tests in one process after the other: one that hangs or ends its process costs only itself.

    Attributes:
        outcomes: outcome, seconds and reason of each test, by id.
    """

    def __init__(self, folder: Path, name: str, ids: list[str]) -> None:
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._file = folder / f"outcomes-{name}.jsonl"
        self._ids = ids

    def execute(self) -> None:
        """Run all tests."""
        remaining = self._ids
        while remaining:
            self._file.write_text("")
            self._run_pytest(remaining)
            started = None
            for line in self._file.read_text().splitlines():
                outcome = json.loads(line)
                if outcome["outcome"] == "started":
                    started = outcome["id"]
                    continue
                before = self.outcomes.get(outcome["id"])
                if before is None or outcome["outcome"] == "failed":
                    self.outcomes[outcome["id"]] = outcome
            # What began, and did not end, ended the process.
            lost = started or remaining[0]
            if lost not in self.outcomes:
                self.outcomes[lost] = {
                    "id": lost,
                    "outcome": "failed",
                    "seconds": float(LIMIT_S),
                    "reason": "it hung, or ended the process",
                }
            remaining = [i for i in remaining if i not in self.outcomes]

    def _run_pytest(self, ids: list[str]) -> None:
        listed = self._file.with_suffix(".txt")
        listed.write_text("\n".join(ids))
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "-p", "outcomes", "--timeout", str(LIMIT_S), "--timeout-method", "signal",
            f"@{listed}",
        ]  # fmt: skip
        with self._file.with_suffix(".log").open("a") as log:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=plain_environment(OUTCOMES=str(self._file)),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            size, since = -1, time.monotonic()
            while True:
                try:
                    process.wait(5)
                    break
                except subprocess.TimeoutExpired:
                    new = self._file.stat().st_size
                    if new != size:
                        size, since = new, time.monotonic()
                    elif time.monotonic() - since > LIMIT_S + 30:
                        os.killpg(process.pid, 9)
                        process.wait()
                        break


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


def class_of(test_id: str) -> str:
    """The class of a test, or for a function its file."""
    parts = test_id.split("::")
    return parts[1] if len(parts) > 2 else parts[0]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("pattern", nargs="*", help="only ids that contain one of these")
    parser.add_argument("--theirs", action="store_true", help="run TorchRL's own collectors")
    parser.add_argument("--every", action="store_true", help="also tests that are not applicable")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--tracebacks", action="store_true", help="print those of the failures")
    return parser.parse_args()


def main() -> None:
    """Run the tests, and print what became of them."""
    given = parse()
    reference = dict(read_list(REFERENCE))
    recorded = {class_of(i) for i in reference}
    exclusions = list(read_list(EXCLUDED))
    with tempfile.TemporaryDirectory(prefix="yardstick-") as name:
        folder = Path(name)
        copy_tests(given.checkout, folder, frozenset() if given.theirs else our_names())
        ids = selected_ids(folder, given.pattern)
        reasons = {i: excluded_for(canonical(i), exclusions) for i in ids}
        for i in ids:
            # TestRPCCollector, all of which TorchRL passes on an idle host, is not in the list.
            is_known = canonical(i) in reference or class_of(i) not in recorded
            if not given.theirs and not is_known and reasons[i] is None:
                reasons[i] = "TorchRL's own collector does not pass it here"
        chosen = [i for i in ids if given.every or given.theirs or reasons[i] is None]
        runs = [Run(folder, str(job), chosen[job :: given.jobs]) for job in range(given.jobs)]
        threads = [threading.Thread(target=run.execute) for run in runs]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.monotonic() - begin
    outcomes = {i: outcome for run in runs for i, outcome in run.outcomes.items()}
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1))
    if given.theirs:
        write_reference(outcomes, merge=bool(given.pattern))
    report(ids, reasons, outcomes, wall_s, tracebacks=given.tracebacks)


def write_reference(outcomes: dict[str, dict[str, Any]], *, merge: bool) -> None:
    """Write the list of the tests that TorchRL's own collectors pass."""
    known = dict(read_list(REFERENCE)) if merge else {}
    for i, outcome in outcomes.items():
        known.pop(i, None)
        if outcome["outcome"] == "passed":
            known[i] = f"{outcome['seconds']}"
    head = "# The tests that TorchRL's own collectors pass, with the seconds that each took.\n"
    REFERENCE.write_text(head + "".join(f"{i}  {s}\n" for i, s in known.items()))


def report(
    ids: list[str],
    reasons: dict[str, str | None],
    outcomes: dict[str, dict[str, Any]],
    wall_s: float,
    *,
    tracebacks: bool,
) -> None:
    """Print what passed of each class, why tests were excluded, and what failed."""
    passed: collections.Counter[str] = collections.Counter()
    applicable: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    failures = []
    for i in ids:
        if reasons[i] is not None or i not in outcomes:
            continue
        outcome = outcomes[i]
        applicable[class_of(i)] += 1
        seconds[class_of(i)] += outcome["seconds"]
        if outcome["outcome"] == "passed":
            passed[class_of(i)] += 1
        else:
            failures.append(outcome)
    differs = list(read_list(DIFFERS))
    for outcome in failures:
        reason = excluded_for(canonical(outcome["id"]), differs)
        if reason is not None:
            print(f"differs: {outcome['id']}\n    {reason}")
            continue
        last = [line for line in outcome["reason"].splitlines() if line.strip()]
        print(f"{outcome['outcome']}: {outcome['id']}\n    {last[-1][:300] if last else ''}")
        if tracebacks:
            print(outcome["reason"])
    print(f"\n{'class':45} {'passed':>6} {'of':>4} {'seconds':>8}")
    for name in applicable:
        print(f"{name:45} {passed[name]:6} {applicable[name]:4} {seconds[name]:8.0f}")
    total = sum(applicable.values())
    print(f"{'all':45} {passed.total():6} {total:4} {wall_s:8.0f} (wall)")
    counts = collections.Counter(reason for reason in reasons.values() if reason is not None)
    for reason, count in counts.most_common():
        print(f"excluded: {count:4}  {reason}")


if __name__ == "__main__":
    main()
