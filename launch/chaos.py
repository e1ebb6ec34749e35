"""Injures the workers of a run at random, and checks every frame that arrives all the same.

    python launch/chaos.py --seconds 120
    sudo python launch/chaos.py --seconds 1800 --hosts    # two more hosts, as network namespaces

``--help`` says more.
"""

import sys
from pathlib import Path

from distcollect.chaos.command import main

if __name__ == "__main__":
    sys.exit(main(testbed=Path(__file__).parents[1] / "tests" / "testbed"))
