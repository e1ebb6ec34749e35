"""Where things are in a checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
LAUNCH = ROOT / "launch"
SCRIPTS = TESTS / "helpers" / "scripts"
TESTBED = TESTS / "helpers" / "testbed"
