"""Compares distcollect with a bare loop and with other collectors; needs a checkout.

    python launch/benchmark.py --list
    python launch/benchmark.py --workload cartpole-16 --json bench.json

``--help`` says more. To measure your own env and policy, use ``distcollect bench``.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    sys.exit(importlib.import_module("benchmarks.__main__").main())
