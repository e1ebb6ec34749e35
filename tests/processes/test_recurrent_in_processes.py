"""Recurrent policies in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.recurrent_policies import Counter, check_through_workers, counting_with_tensordict

import distcollect as dc


@pytest.mark.parametrize("maker", [counting_with_tensordict, Counter])
@pytest.mark.parametrize("collector", [dc.RPCDataCollector], ids=["collector1"])
def test_through_workers(maker: Callable[[], Any], collector: Callable[..., Any]) -> None:
    check_through_workers(maker, collector)
