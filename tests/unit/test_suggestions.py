"""Misspelled names of settings."""

from __future__ import annotations

from typing import Any

import pytest

import distcollect as dc


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (dc.Faults, "step_timeout", "step_timeout_s"),
        (dc.Monitor, "callbak", "callback"),
        (dc.WeightSync, "change_only", "changes_only"),
        (dc.Staleness, "max_lag", "max_policy_lag"),
        (dc.EvaluationWorkers, "num_episode", "num_episodes"),
    ],
)
def test_a_misspelled_setting_gets_a_suggestion(kind: Any, name: str, meant: str) -> None:
    expected = rf"^{kind.__name__}: no argument '{name}' \(did you mean '{meant}'\?\); there are: "
    with pytest.raises(dc.ArgumentTypeError, match=expected):
        kind(**{name: 1})


def test_a_handle_says_who_has_the_weights() -> None:
    handle = dc.PushHandle(7, [0, 1, 2], 1.0)
    assert repr(handle) == "<PushHandle: version 7; workers: no answer yet from [0, 1, 2]>"
    handle.settle(0, 7)
    handle.settle(2, dc.WorkerLost("it died", worker_id=2))
    states = "acknowledged by [0]; left out [2]; no answer yet from [1]"
    assert repr(handle) == f"<PushHandle: version 7; workers: {states}>"
    assert repr(dc.PushHandle(7, [], 1.0)) == "<PushHandle: version 7; workers: none>"
