"""A collector goes on where another one was."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.resuming import Policy, check_goes_on_with_another_number_of_workers, collector

import distcollect as dc


@pytest.mark.parametrize(("before", "after"), [(0, 0)])
def test_goes_on_with_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    check_goes_on_with_another_number_of_workers(tmp_path, before, after)


def test_bad_states_are_refused() -> None:
    with collector(0, Policy()) as fresh:
        for bad in ({}, {"format": 99}, None):
            with pytest.raises(dc.ArgumentError, match="no state of a collector"):
                fresh.load_state_dict(bad)  # type: ignore[arg-type]
        state = fresh.state_dict()
        fresh.next()
        with pytest.raises(dc.CollectorStateError, match="before its first batch"):
            fresh.load_state_dict(state)
