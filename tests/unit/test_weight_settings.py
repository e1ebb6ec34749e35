"""Invalid settings of publishing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pytest
from helpers.envs import ProcessIdEnv
from helpers.publishing import Telling
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


BAD: Sequence[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dc.WeightSync(wire_dtype="int8"), ValueError, "wire_dtype='int8'.*bfloat16"),
    (lambda: dc.WeightSync(exclude="critic"), TypeError, r"\['critic.\*'\]"),
    (lambda: dc.WeightSync(exclude=None), TypeError, r"\['critic.\*'\]"),  # type: ignore[arg-type]
    (lambda: dc.WeightSync(ready_timeout_s=0), ValueError, "ready_timeout_s=0"),
    (lambda: dc.Staleness(-1), ValueError, "max_policy_lag=-1"),
    (lambda: dc.Staleness(1.5), ValueError, "max_policy_lag=1.5"),  # type: ignore[arg-type]
    (lambda: dc.Staleness(1, mode="wait"), ValueError, "'pace', 'drop' or 'mask'"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_settings(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": [nn.Linear(1, 1)]}, TypeError, "dict of names to modules"),
        ({"models": {"a.b": nn.Linear(1, 1)}}, ValueError, "without dots"),
        ({"models": {"policy": nn.Linear(1, 1)}}, ValueError, "taken"),
        ({"weight_updater": "rpc"}, TypeError, "WeightUpdaterBase"),
        ({"max_weight_update_interval": 0}, ValueError, "at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dc.RPCDataCollector(ProcessIdEnv, Telling(), frames_per_batch=4, num_workers=1, **arguments)
