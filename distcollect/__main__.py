"""``python -m distcollect``."""

import sys

from distcollect.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
