"""``python -m benchmarks``, with the folder ``tests`` on the path; see ``launch/benchmark.py``."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import command
from distcollect.errors import ArgumentError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what ``argv`` names; None: the arguments of this process."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=command.__doc__)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args(argv))
    except ArgumentError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
