"""A membership with fixed limits."""

from __future__ import annotations

import random

from distcollect.roster.membership import Membership

SILENCE_S = 8.0
START_S = 100.0
PAUSE_S = 2.0


def make(max_restarts: int = 3, seed: int = 0) -> Membership:
    return Membership(SILENCE_S, START_S, max_restarts, rng=random.Random(seed))
