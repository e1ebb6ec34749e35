"""The foreign judge: TorchRL's own tests and scripts with the collectors of this package.

::

    python tests/torchrl_suite/judge.py /tmp/rl --summary build/judge.md

The argument is a checkout of pytorch/rl, of the release that is installed. It runs all tests of
``yardstick.py`` and all scripts of ``scripts.py`` with only the import changed, prints what failed,
and writes one summary with the counts, in Markdown. A script that fails runs again with TorchRL's
own collectors; if it fails with these too, it doesn't count. Install what both need, see there.
It takes about an hour on two idle cores. The exit status is 1 if something failed that should not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import sys
from pathlib import Path

from script_list import SCRIPTS
from scripts import run
from yardstick import HEAD, SELECTED, judge, our_names, report


def judged_scripts(checkout: Path) -> dict[str, str]:
    """The names of the scripts that don't run, with the last line that each printed.

    Names of those that fail with TorchRL's collectors as well have no line.
    """
    failed = {}
    for name, script in SCRIPTS.items():
        outcome = run(script, checkout, our_names())
        if not outcome.succeeded:
            theirs = run(script, checkout, frozenset())
            failed[name] = outcome.last[:200] if theirs.succeeded else ""
            print(f"{name}: {outcome.last[:200]}", flush=True)
    return failed


def main() -> int:
    """Run all of it, and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("--summary", type=Path, help="write the counts to this file")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    given = parser.parse_args()
    tests = judge(given.checkout, jobs=given.jobs)
    report(tests, tracebacks=True)
    failed = judged_scripts(given.checkout)
    broken = {name: line for name, line in failed.items() if line}
    num_counted = len(SCRIPTS) - len(failed) + len(broken)
    rows = [tests.row(name.rpartition("::")[2]) for name in SELECTED]
    version = importlib.metadata.version("torchrl")
    summary = "\n".join(
        [
            f"TorchRL {version}, {dt.date.today()}",  # noqa: DTZ011 - a day on this machine
            "",
            HEAD,
            *rows,
            "",
            f"Scripts: {num_counted - len(broken)} of {num_counted} run.",
            f"Not counted: {len(failed) - len(broken)} that fail with TorchRL's collectors too.",
            *(f"- {name}: {line}" for name, line in broken.items()),
        ]
    )
    print(f"\n{summary}")
    if given.summary:
        given.summary.parent.mkdir(parents=True, exist_ok=True)
        given.summary.write_text(summary + "\n")
    return int(bool(broken) or any(not row.endswith("| 0 |") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
