"""A short part of the tests with processes, as with a torch without RPC; see CONTRIBUTING."""

from __future__ import annotations

import pytest
from helpers.paths import ROOT
from helpers.programs import run_python
from helpers.transports import WITHOUT_RPC

# Launches, several trainers, a worker that dies, weights, evaluation, Ctrl-C, preemption.
CHOSEN = (
    "test_launch.py::test_slurm_variables_on_one_host",
    "test_launch.py::test_a_process_group_and_what_is_beside_it",
    "test_handover_between_trainers.py",
    "test_recovery.py::test_a_killed_worker_is_replaced_and_gets_the_newest_weights[async]",
    "test_weights.py::test_only_the_selected_get_them[1-selected2]",
    "test_calls_of_processes.py::TestEvaluationWorkers::test_each_version_in_the_background",
    "test_endings.py::test_torchrun_is_ended[fine-SIGINT-group]",
    "test_checkpoint_of_workers.py::test_a_signal_saves_and_ends[step-15-75]",
    "test_transports.py::TestTls::test_calls",
    "test_rpc_transport.py",
)


@pytest.mark.skipif(WITHOUT_RPC, reason="these tests run as they are")
def test_a_short_part_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCOLLECT_TEST_WITHOUT_RPC", "1")
    chosen = [ROOT / "tests" / "processes" / name for name in CHOSEN]
    done = run_python("-m", "pytest", "-x", "-p", "no:cacheprovider", *chosen, timeout_s=280)
    # Those that are about RPC itself are skipped: it really is missing.
    passed = f"{len(CHOSEN) - 1} passed, 1 skipped"
    assert passed in done.stdout, done.stdout[-5000:] + done.stderr
    assert done.returncode == 0
