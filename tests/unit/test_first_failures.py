"""When the run ends because every replacement of a worker fails like the process before it."""

from __future__ import annotations

from distcollect.errors import EnvError, WorkerLost
from distcollect.trainer.first_failures import FirstFailures
from distcollect.trainer.worker_slots import WorkerSlot


def test_all_workers_have_to_fail_three_times_by_the_same_error() -> None:
    failures = FirstFailures()

    def fails(
        worker_id: int, incarnation: int, error: BaseException, num_requests: int = 1
    ) -> bool:
        slot = WorkerSlot(worker_id, incarnation, 0, num_requests=num_requests)
        return failures.is_final(slot, error, [0, 1])

    for incarnation in range(5):
        assert not fails(0, incarnation, EnvError(f"worn out (pid {incarnation})", worker_id=0))
    assert not fails(1, 0, EnvError("worn out (pid 7)", worker_id=1))
    assert not fails(1, 0, EnvError("worn out (pid 7)", worker_id=1))  # the same process
    assert not fails(1, 1, ValueError("another"))
    assert not fails(1, 2, EnvError("worn out (pid 8)", worker_id=1))
    assert not fails(1, 3, WorkerLost("killed"))
    assert not fails(1, 4, EnvError("worn out (pid 9)", worker_id=1))
    failures.collected(0)
    assert not fails(1, 5, EnvError("worn out (pid 9)", worker_id=1))
    for incarnation in (6, 7):
        assert not fails(0, incarnation, EnvError("worn out (pid 9)", worker_id=0))
    assert not fails(0, 8, EnvError("worn out (pid 9)", worker_id=0), num_requests=2)
    assert fails(0, 9, EnvError("worn out (pid 9)", worker_id=0))
