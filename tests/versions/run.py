"""Runs the tests with each set of versions in constraints/, and prints a table of what they gave.

    tests/versions/run.py                                    # all sets, with this Python
    tests/versions/run.py lowest --python ~/python3.10/bin/python3
    tests/versions/run.py newest --tests tests               # all tests, not just the usual ones

Each set gets a virtual environment of its own below --folder, with the packages that pip finds for
the set. Other builds of torch than the tested one bring CUDA libraries: about 3 GB to download, and
8 GB on the disk for each set. Only the standard library is needed to run this script.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "tensordict", "torchrl", "gymnasium", "numpy", "submitit")
# The fast tests, and of those with processes the parts that depend most on other packages.
TESTS = (
    "tests/unit",
    "tests/loopback",
    "tests/processes/test_launch.py",
    "tests/processes/test_lazy_compiler.py",
    "tests/processes/test_recovery.py",
    "tests/processes/test_rpc_transport.py",
    "tests/processes/test_transports.py",
    "tests/processes/test_weights.py",
    "tests/examples/test_docs.py::test_its_code_runs[README.md]",
)
# What the sets install.
EXTRAS = "envpool,examples,test,torchrl"
# TorchRL takes only the TensorDict of its own time, so the lowest and the newest TensorDict have
# sets without it.
WITHOUT = "envpool,examples,test"
SETS = {
    "lowest": ("lowest.txt", WITHOUT),
    "lowest-torchrl": ("lowest-torchrl.txt", EXTRAS),
    "tested": ("tested.txt", EXTRAS),
    "newest": ("newest.txt", WITHOUT),
    "newest-torchrl": ("newest.txt", EXTRAS),
}


Row: TypeAlias = "dict[str, str | int]"  # of the table, by the titles of its columns


def main() -> int:
    """Run what the command line asks for; return the exit code: 0 if no test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="for environments")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="for pytest")
    given = parser.parse_args()
    if unknown := set(given.sets) - SETS.keys():
        parser.error(f"no such set: {', '.join(unknown)}; there are {', '.join(SETS)}")
    # A shell has what it starts in the background ignore Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = [
        run_set(name, given.python, given.folder.resolve(), given.tests)
        for name in given.sets or SETS
    ]
    print_table(rows)
    return int(any(row["failed"] for row in rows))


def run_set(name: str, python: str, folder: Path, tests: list[str]) -> Row:
    """Install one set, and run the tests with it."""
    file, extras = SETS[name]
    venv = folder / f"{name}-{output(python, '-c', 'import sys; print(sys.version.split()[0])')}"
    ours = str(venv / "bin" / "python")
    if not venv.exists():
        subprocess.run([python, "-m", "venv", venv], check=True)
        subprocess.run([ours, "-m", "pip", "install", "-q", "-U", "pip"], check=True)
    subprocess.run(
        [
            *(ours, "-m", "pip", "install", "-q", "-U", "--upgrade-strategy", "eager"),
            *("-c", ROOT / "constraints" / file, "-e", f"{ROOT}[{extras}]"),
        ],
        check=True,
    )
    begin = time.monotonic()
    report = venv / "report.xml"
    subprocess.run(
        [
            *(ours, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"),
            *("-p", "no:cacheprovider", *tests),
        ],
        cwd=ROOT,
        check=False,
    )
    minutes = (time.monotonic() - begin) / 60
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.parse(report).iter("testsuite"):
        counts = {key: count + int(suite.get(key, 0)) for key, count in counts.items()}
    failed = counts["failures"] + counts["errors"]
    found = json.loads(output(ours, "-m", "pip", "list", "--format=json"))
    versions = {package["name"]: package["version"] for package in found}
    return {
        "set": name,
        "Python": output(ours, "-c", "import sys; print(sys.version.split()[0])"),
        "versions": " ".join(f"{each} {versions.get(each, '-')}" for each in SHOWN),
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "minutes": f"{minutes:.0f}",
    }


def output(*command: str) -> str:
    """What a command prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def print_table(rows: list[Row]) -> None:
    """Print the rows as a Markdown table."""
    print("\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    sys.exit(main())
