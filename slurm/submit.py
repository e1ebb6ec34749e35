"""Submits a training script to a SLURM cluster; the same as ``distcollect submit``."""

import sys

from distcollect.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["submit", *sys.argv[1:]]))
