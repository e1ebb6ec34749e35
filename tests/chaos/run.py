"""Injures the workers of a run at random, and checks every frame that arrives all the same.

    python tests/chaos/run.py --seconds 120
    sudo python tests/chaos/run.py --seconds 1800 --hosts    # two more hosts, as network namespaces

``--help`` says more.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)

from chaos.command import main  # noqa: E402 - the package is beside the tests

if __name__ == "__main__":
    sys.exit(main(testbed=TESTS / "helpers" / "testbed"))
