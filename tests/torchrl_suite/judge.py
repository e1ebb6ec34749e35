"""The foreign judge: TorchRL's own tests and scripts with the collectors of this package.

::

    pip install hydra-core tqdm matplotlib psutil tensorboard "gymnasium[mujoco,atari]" \\
        torchvision pettingzoo[mpe] vmas
    python tests/torchrl_suite/judge.py /tmp/rl --summary build/judge.md
    python tests/torchrl_suite/judge.py /tmp/rl --only tests TestRPCCollector   # one class
    python tests/torchrl_suite/judge.py /tmp/rl --only scripts sac dqn          # some scripts
    python tests/torchrl_suite/judge.py /tmp/rl --only tests --theirs           # the reference

The argument is a checkout of pytorch/rl, of the release that is installed. It runs all tests of
``yardstick.py`` and all scripts of ``scripts.py`` with only the import changed, prints what failed,
and a summary with the counts, in Markdown. A script that fails runs again with TorchRL's own
collectors; if it fails with these too, it doesn't count. It takes about an hour on two idle cores.
The exit status is 1 if something failed that should not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from script_list import SCRIPTS
from scripts import run
from yardstick import HEAD, SELECTED, judge, our_names, report, write_reference


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of pytorch/rl")
    parser.add_argument("pattern", nargs="*", help="only what has one of these in its name")
    parser.add_argument("--only", choices=["tests", "scripts"], help="not the others")
    parser.add_argument("--theirs", action="store_true", help="with TorchRL's own collectors")
    parser.add_argument("--summary", type=Path, help="write the counts to this file")
    parser.add_argument("--logs", type=Path, help="a folder for what the scripts print")
    return parser.parse_intermixed_args()


def judged_tests(given: argparse.Namespace) -> Iterator[str]:
    """Run the tests; yield the lines of the table."""
    tests = judge(given.checkout, given.pattern, theirs=given.theirs)
    if given.theirs:
        write_reference(tests.outcomes, merge=bool(given.pattern))
    report(tests)
    yield HEAD
    for name in (part.rpartition("::")[2] for part in SELECTED):
        if any(name in test_id for test_id in tests.reasons):
            yield tests.row(name)


def judged_scripts(given: argparse.Namespace) -> Iterator[str]:
    """Run the scripts; yield how many run, and the last line of those that should and don't."""
    ours = frozenset() if given.theirs else our_names()
    outcomes = {}
    for name, script in SCRIPTS.items():
        if given.pattern and not any(part in name for part in given.pattern):
            continue
        log = given.logs and given.logs / f"{name.replace(' ', '-')}.txt"
        outcome = run(script, given.checkout, ours, log=log)
        counts = outcome.succeeded or run(script, given.checkout, frozenset()).succeeded
        outcomes[name] = outcome.succeeded, counts
        print(f"{name}: {'runs' if outcome.succeeded else outcome.last[:200]}", flush=True)
        if counts and not outcome.succeeded:
            yield f"- {name}: {outcome.last[:200]}"
    num_counted = sum(counts for _, counts in outcomes.values())
    num_run = sum(succeeded for succeeded, _ in outcomes.values())
    yield f"Scripts: {num_run} of {num_counted} run."
    yield f"Not counted: {len(outcomes) - num_counted} that fail with TorchRL's collectors too."


def main() -> int:
    """Run all of it, and write the counts."""
    given = parsed()
    # The day on this machine.
    summary = [f"TorchRL {importlib.metadata.version('torchrl')}, {dt.date.today()}", ""]  # noqa: DTZ011
    if given.only != "scripts":
        summary += [*judged_tests(given), ""]
    if given.only != "tests":
        summary += judged_scripts(given)
    print("\n" + "\n".join(summary))
    if given.summary:
        given.summary.parent.mkdir(parents=True, exist_ok=True)
        given.summary.write_text("\n".join(summary) + "\n")
    rows = [line for line in summary if line.startswith(("| test", "| Test"))]
    failed = any(not row.endswith("| 0 |") for row in rows)
    return int(failed or any(line.startswith("- ") for line in summary))


if __name__ == "__main__":
    sys.exit(main())
