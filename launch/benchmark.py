"""Compares distcollect with a bare loop and with other collectors.

    python launch/benchmark.py --quick
    python launch/benchmark.py --json bench.json --png bench.png

The same as ``python -m distcollect bench``; ``--help`` says more.
"""

import sys

from distcollect.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
