"""Injects random faults into the workers of a run, and checks every frame that arrives.

    python tests/chaos/run.py --seconds 120
    sudo python tests/chaos/run.py --seconds 1800 --hosts    # two more hosts, as network namespaces

``--help`` lists all options.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)

from chaos.command import main  # noqa: E402 - the package is beside the tests

if __name__ == "__main__":
    sys.exit(main())
