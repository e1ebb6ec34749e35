"""A process that has used torch's RPC before."""

from __future__ import annotations

import pytest
from helpers.paths import SCRIPTS
from helpers.programs import run_python


@pytest.mark.xfail(strict=True, reason="the raw RuntimeError of torch's autograd container")
def test_as_another_rank_than_a_trainer_needs() -> None:
    done = run_python(SCRIPTS / "use_rpc_before.py", timeout_s=120)
    assert "CollectorStateError: " in done.stderr, done.stderr
    assert "rank 1 of torch.distributed.rpc" in done.stderr
