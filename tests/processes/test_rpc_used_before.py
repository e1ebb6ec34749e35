"""A process that has used torch's RPC before."""

from __future__ import annotations

from helpers.paths import SCRIPTS
from helpers.programs import run_python
from helpers.transports import needs_rpc


@needs_rpc
def test_as_another_rank_than_a_trainer_needs() -> None:
    done = run_python(SCRIPTS / "use_rpc_before.py", timeout_s=120)
    assert "CollectorStateError: " in done.stderr, done.stderr
    assert "used torch.distributed.rpc before, under a rank above 0" in done.stderr
