"""What a user is told when a launch fails: what was wrong, with which value, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable

import cloudpickle
import pytest
from helpers.bad_launches import LAUNCHES
from helpers.error_rows import check

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("row", range(len(LAUNCHES)))
def test_of_launches(row: int, started: Callable[[], list[str]]) -> None:
    check(LAUNCHES[row])
    assert started() == []
