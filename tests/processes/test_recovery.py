"""Workers die, hang, leave and join; the run goes on, and every frame is accounted for."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.bad_launches import free_port
from helpers.descendants import signal_all
from helpers.marked import Marked
from helpers.policies import ShownWeight
from helpers.waiting import stop_process
from tensordict import TensorDict

import distcollect as dc

SOON_S = 60  # what takes a moment on a fast machine
END_S = 60
JOIN_S = 100  # a supervisor and then a worker import torch, which takes long on a slow machine
cloudpickle.register_pickle_by_value(sys.modules[__name__])
# A worker that joins from outside can't import the tests' helpers.
cloudpickle.register_pickle_by_value(sys.modules[ShownWeight.__module__])


class Telling(gym.Env[np.ndarray, np.int64]):
    """Observes its process id and the steps of its episode, which has ten."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, pause_s: float = 0.0, hang_at: int = -1, memory: bool = False) -> None:
        self.pause_s = pause_s
        self.hang_at = hang_at
        self.hoard: list[bytes] | None = [] if memory else None
        self.total = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.total += 1
        if self.total == self.hang_at:
            time.sleep(1000)
        if self.hoard is not None:
            self.hoard.append(os.urandom(1 << 20))
        time.sleep(self.pause_s)
        return self._observe(), 1.0, self.steps == 10, False, {}

    def _observe(self) -> np.ndarray:
        return np.array([os.getpid(), self.steps], np.float64)


def slow() -> Telling:
    return Telling(pause_s=0.001)


def hangs_once(context: dc.EnvContext) -> Telling:
    hangs = context.worker_id == 1 and context.incarnation == 0
    return Telling(pause_s=0.001, hang_at=30 if hangs else -1)


def grows_once(context: dc.EnvContext) -> Telling:
    return Telling(pause_s=0.001, memory=context.worker_id == 1 and context.incarnation == 0)


class Checker:
    """Checks in each batch what must hold whatever happens to workers."""

    def __init__(self) -> None:
        self.owners: dict[int, tuple[int, int]] = {}
        self.pids: dict[int, int] = {}
        self.frames = 0

    def see(self, batch: TensorDict) -> None:
        self.frames += batch.numel()
        ids = batch["collector", "traj_ids"].flatten()
        workers = batch["collector", "worker_id"].flatten()
        pids = batch["observation"].reshape(-1, 2)[:, 0].long()
        for traj_id, worker_id, pid in {
            *zip(ids.tolist(), workers.tolist(), pids.tolist(), strict=True)
        }:
            assert self.owners.setdefault(traj_id, (worker_id, pid)) == (worker_id, pid), "spliced"
            self.pids[worker_id] = pid
        steps = batch["observation"][..., 1]
        same = batch["collector", "traj_ids"][..., 1:] == batch["collector", "traj_ids"][..., :-1]
        assert (steps[..., 1:] - steps[..., :-1] == 1)[same].all(), "a gap within a trajectory"
        if "weight" in batch:
            assert (batch["weight"] == batch["collector", "policy_version"]).all(), "wrong weights"


def until(
    collector: dc.RPCDataCollector, checker: Checker, holds: Callable[[], bool], within_s: float
) -> float:
    """Collect until ``holds()`` is true; return the seconds that took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < within_s, collector.worker_states
        checker.see(collector.next(timeout_s=within_s))
    return time.monotonic() - begin


def balances(collector: dc.RPCDataCollector, checker: Checker) -> dict[str, int]:
    """Check that each frame was delivered or lost; return the lost ones by cause."""
    report = collector.ledger
    for frames in (*report.workers.values(), report.total):
        assert frames.open == 0, f"\n{report}"
        assert frames.stepped == frames.delivered + sum(frames.lost.values()), f"\n{report}"
        assert min([*frames.lost.values(), frames.delivered]) >= 0, f"\n{report}"
    assert report.total.delivered == checker.frames
    return dict(report.total.lost)


def collect_with(sync: bool, make: Any = slow, **kwargs: Any) -> dc.RPCDataCollector:
    given = {"num_workers": 2, "envs_per_worker": 2, "frames_per_batch": 80 if sync else 40}
    return dc.RPCDataCollector(make, sync=sync, **{**given, **kwargs})


modes = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


@modes
def test_a_killed_worker_is_replaced_and_gets_the_newest_weights(
    marked: Marked, sync: bool
) -> None:
    policy, checker = ShownWeight(), Checker()
    with collect_with(sync, policy=policy) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        for version in range(1, 4):
            policy.weight.data.fill_(version)
            collector.update_policy_weights_(policy, worker_ids=None if version < 3 else [0])
        killed = checker.pids[1]
        os.kill(killed, signal.SIGKILL)
        until(collector, checker, lambda: checker.pids[1] != killed, JOIN_S)
        newest = collector.stats().workers[1]
        assert (newest.pid, newest.host) == (checker.pids[1], socket.gethostname())
        assert Path(f"/proc/{newest.pid}/comm").read_text() == "dc-worker-1\n"
        batch = collector.next()
        while not (mine := batch["collector", "worker_id"] == 1).any():
            checker.see(batch)
            batch = collector.next()
        checker.see(batch)
        # The newest version sent to this slot, which is not the newest of all.
        assert (batch["collector", "policy_version"][mine] == 2).all()
        assert {s.value for s in collector.worker_states.values()} == {"ready"}
    lost = balances(collector, checker)
    assert set(lost) <= {"worker_lost", "shut_down"}
    assert marked.gone(END_S), marked.left()


def test_weights_wait_for_the_replacement_of_the_only_worker(marked: Marked) -> None:
    policy, checker = ShownWeight(), Checker()
    with collect_with(True, policy=policy, num_workers=1, frames_per_batch=40) as collector:
        checker.see(collector.next())
        os.kill(checker.pids[0], signal.SIGKILL)
        policy.weight.data.fill_(1)
        handle = collector.update_policy_weights_(policy)
        assert handle is not None
        assert handle.acknowledged == {0: 1}
        assert not handle.left_out
        batch = collector.next(timeout_s=JOIN_S)
        checker.see(batch)
        assert (batch["collector", "policy_version"] == 1).all()
    balances(collector, checker)


def test_a_missing_share_can_wait_for_the_replacement(marked: Marked) -> None:
    checker = Checker()
    faults = dc.Faults(missing_share="replacement")
    with collect_with(True, faults=faults) as collector:
        for turn in range(6):
            if turn == 3:
                os.kill(checker.pids[1], signal.SIGKILL)
            batch = collector.next(timeout_s=JOIN_S)
            checker.see(batch)
            assert batch["collector", "worker_id"][:, 0].tolist() == [0, 0, 1, 1]
    balances(collector, checker)


def test_a_stopped_worker_is_found_by_its_silence(marked: Marked) -> None:
    checker = Checker()
    with collect_with(False, faults=dc.Faults(silence_timeout_s=2)) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        stopped = checker.pids[1]
        stop_process(stopped)
        begin = time.monotonic()
        until(collector, checker, lambda: checker.pids[1] != stopped, JOIN_S)
        assert not Path(f"/proc/{stopped}").exists()
    # The ping that it did not answer may have been sent just before.
    assert time.monotonic() - begin > 1.9
    balances(collector, checker)
    assert marked.gone(END_S), marked.left()


def test_a_worker_that_is_stopped_for_a_moment_stays(marked: Marked) -> None:
    checker = Checker()
    with collect_with(False, faults=dc.Faults(silence_timeout_s=4)) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        pids = dict(checker.pids)
        stop_process(pids[1])
        until(
            collector, checker, lambda: collector.worker_states[1] is dc.WorkerState.SUSPECTED, 10
        )
        os.kill(pids[1], signal.SIGCONT)
        until(
            collector, checker, lambda: collector.worker_states[1] is dc.WorkerState.READY, SOON_S
        )
        checker.pids.clear()
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        assert checker.pids == pids
    balances(collector, checker)


def test_a_hung_step_is_found_by_the_watchdog(marked: Marked) -> None:
    checker = Checker()
    faults = dc.Faults(step_timeout_s=1)
    with collect_with(True, hangs_once, faults=faults) as collector:
        until(collector, checker, lambda: collector.ledger.total.lost.get("hung", 0) > 0, SOON_S)
        until(collector, checker, lambda: collector.num_workers == 2, JOIN_S)
    assert balances(collector, checker)["hung"] > 0
    assert marked.gone(END_S), marked.left()


def test_a_worker_that_grows_is_retired_without_losing_a_frame(marked: Marked) -> None:
    checker = Checker()
    faults = dc.Faults(max_worker_bytes=600 << 20)
    with collect_with(False, grows_once, faults=faults) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        first = checker.pids[1]
        until(collector, checker, lambda: checker.pids[1] != first, JOIN_S)
    assert set(balances(collector, checker)) <= {"shut_down"}


def crashes(context: dc.EnvContext) -> Telling:
    class Crashing(Telling):
        def step(self, action: np.int64) -> Any:
            if self.total == 20 and context.worker_id == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            return super().step(action)

    return Crashing()


def test_a_worker_that_crashes_again_and_again_is_given_up(
    marked: Marked, capfd: pytest.CaptureFixture[str]
) -> None:
    checker = Checker()
    with collect_with(False, crashes, faults=dc.Faults(max_restarts=1)) as collector:
        until(
            collector,
            checker,
            lambda: collector.worker_states[1] is dc.WorkerState.LOST,
            2 * JOIN_S,
        )
        checker.see(collector.next())
    balances(collector, checker)
    line = crashes.__code__.co_firstlineno + 4
    assert f'test_recovery.py", line {line} in step' in capfd.readouterr().err
    with collect_with(False, crashes, faults=dc.Faults(max_restarts=0, min_workers=2)) as collector:
        with pytest.raises(
            dc.WorkerLost, match=r"worker 1: .*SIGSEGV.*1 worker\(s\) left"
        ) as caught:
            until(collector, Checker(), lambda: False, SOON_S)
        assert caught.value.worker_id == 1
    assert marked.gone(END_S), marked.left()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("make", "its frames or weights differ"),
        ("policy_factory", "policy_factory raised OSError: no file"),
        ("init_fn", "init_fn raised OSError: no file"),
    ],
)
def test_a_process_that_fails_where_others_got_ready_does_not_end_the_run(
    marked: Marked, tmp_path: Path, broken: str, said: str
) -> None:
    """It is as if a worker had joined from a host that is set up in another way."""
    wrong, checker = tmp_path / "wrong", Checker()

    def fail() -> None:
        if wrong.exists():
            raise OSError("no file")

    def make_policy() -> ShownWeight:
        fail()
        return ShownWeight()

    def make() -> Telling:
        env = slow()
        if wrong.exists():
            env.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        return env

    ways = {"make": make, "policy_factory": make_policy, "init_fn": fail}
    faults = dc.Faults(max_restarts=1)
    with collect_with(False, faults=faults, **{broken: ways[broken]}) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        wrong.touch()
        os.kill(checker.pids[1], signal.SIGKILL)
        until(collector, checker, lambda: collector.worker_states[1] is dc.WorkerState.LOST, JOIN_S)
        checker.see(collector.next())
        os.kill(checker.pids[0], signal.SIGKILL)
        with pytest.raises(dc.WorkerLost, match=rf"worker 0: {said}.*; 0 worker\(s\) left"):
            until(collector, checker, lambda: False, JOIN_S)
    balances(collector, checker)


def test_at_the_end_nobody_waits_for_a_process_that_has_not_joined_yet(
    marked: Marked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTCOLLECT_ZYGOTE", "off")  # so that it takes seconds to join
    caplog.set_level("INFO", logger="distcollect")
    with collect_with(False) as collector:
        checker = Checker()
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        assert f"worker 1 is ready (pid {checker.pids[1]} on" in caplog.text  # for a debugger
        os.kill(checker.pids[1], signal.SIGKILL)
        until(collector, checker, lambda: collector.num_workers == 1, SOON_S)
    assert "did not end within" not in caplog.text
    assert marked.gone(END_S), marked.left()


@modes
def test_released_workers_leave_without_losing_a_frame(marked: Marked, sync: bool) -> None:
    checker = Checker()
    with collect_with(sync, num_workers=3, frames_per_batch=120 if sync else 40) as collector:
        until(collector, checker, lambda: len(checker.pids) == 3, SOON_S)
        collector.release([1, 2])
        assert collector.num_workers == 1
        assert collector.worker_states[2] is dc.WorkerState.LEFT
        for _ in range(5):
            checker.see(collector.next())
        with pytest.raises(dc.ArgumentError, match=r"no worker \[1\]"):
            collector.release(1)
        collector.release(0)
        with pytest.raises(dc.WorkerLost, match=r"it has left, as it was asked to .*at least 1"):
            until(collector, checker, lambda: False, SOON_S)
    assert set(balances(collector, checker)) <= {"shut_down", "left"}
    assert marked.gone(END_S), marked.left()


class SignalsTwice(Telling):
    """A second SIGTERM comes while the handler of the first one is in an Event, if it uses one.

    They come at once where a scheduler signals all processes: the worker's guard passes its own on.
    """

    def __init__(self) -> None:
        super().__init__(pause_s=0.001)
        notify_all, in_event = threading.Condition.notify_all, threading.Event.set.__code__

        def signal_again(condition: threading.Condition) -> None:
            is_main = threading.get_ident() == threading.main_thread().ident
            if is_main and sys._getframe(1).f_code is in_event:
                threading.Condition.notify_all = notify_all  # type: ignore[method-assign]
                os.kill(os.getpid(), signal.SIGTERM)
            notify_all(condition)

        threading.Condition.notify_all = signal_again  # type: ignore[method-assign]


@pytest.mark.parametrize("make", [slow, SignalsTwice])
def test_sigterm_is_notice_enough_to_leave_without_losing_a_frame(
    marked: Marked, make: Callable[[], Telling]
) -> None:
    checker = Checker()
    with collect_with(False, make) as collector:
        until(collector, checker, lambda: len(checker.pids) == 2, SOON_S)
        os.kill(checker.pids[1], signal.SIGTERM)
        until(collector, checker, lambda: collector.worker_states[1] is dc.WorkerState.LEFT, SOON_S)
        assert collector.num_workers == 1
        checker.see(collector.next())
    assert set(balances(collector, checker)) <= {"shut_down"}


def join(port: int, *further: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distcollect", "worker", "--join", f"127.0.0.1:{port}"]
    return subprocess.Popen(
        [*command, *further], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.timeout(400)
def test_a_worker_joins_a_running_trainer_and_leaves_with_it(
    marked: Marked, token_file: Path, port: int
) -> None:
    policy, checker = ShownWeight(), Checker()
    with collect_with(False, policy=policy, listen=f"127.0.0.1:{port}") as collector:
        policy.weight.data.fill_(1)
        collector.update_policy_weights_(policy)
        joined = join(port)
        until(collector, checker, lambda: 2 in checker.pids, JOIN_S)
        assert collector.num_workers == 3
        os.kill(checker.pids[2], signal.SIGKILL)
        killed = checker.pids[2]
        until(collector, checker, lambda: checker.pids[2] != killed, JOIN_S)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            # Preemption with notice: batch systems tell every process of a job.
            signal_all(joined.pid, number)
            joined.send_signal(number)
        until(collector, checker, lambda: collector.worker_states[2] is dc.WorkerState.LEFT, SOON_S)
        assert joined.wait(END_S) == 128 + signal.SIGTERM
        again = join(port)
        until(collector, checker, lambda: collector.num_workers == 3, JOIN_S)
    assert again.wait(END_S) == 0, again.communicate()[0]
    address = f"127.0.0.1:{port}"
    said = [process.communicate()[0] for process in (joined, again)]
    assert all(f"joined the trainer at {address}" in text for text in said)
    assert "the trainer needs this worker no more" in said[1]
    assert "is ended by the trainer" not in said[0] + said[1]
    assert set(balances(collector, checker)) <= {"shut_down", "worker_lost"}
    assert marked.gone(END_S), marked.left()


@pytest.mark.parametrize(
    ("closes", "ends", "status"),
    [
        (True, "raise ValueError", 1),
        pytest.param(False, "raise ValueError", 1, marks=pytest.mark.slow),
        pytest.param(True, "exit(1)", 1, marks=pytest.mark.slow),
        # Somebody types there, and an exception before said nothing of the run.
        (False, "sys.ps1, sys.last_value = '>>> ', ValueError()", 0),
    ],
)
def test_the_exit_status_of_a_worker_that_joined_a_run_that_fails(
    marked: Marked, token_file: Path, port: int, *, closes: bool, ends: str, status: int
) -> None:
    script = f"""
import contextlib, sys, distcollect as dc
collector = dc.RPCDataCollector("CartPole-v1", frames_per_batch=40, num_workers=1,
                                transport="tcp", listen="127.0.0.1:{port}")
with collector if {closes} else contextlib.nullcontext():
    while collector.num_workers < 2:
        collector.next()
    {ends}
"""
    trainer = subprocess.Popen([sys.executable, "-c", script])
    joined = join(port)
    said, _ = joined.communicate(timeout=JOIN_S)
    assert trainer.wait(END_S) == joined.returncode == status, said
    failed = "the trainer failed, and needs this worker no more; its log says why" in said
    assert failed == bool(status), said
    assert marked.gone(END_S), marked.left()


def test_a_worker_that_joins_finds_what_stands_in_its_folder(
    marked: Marked, token_file: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(
        "import gymnasium as gym\n\ndef make():\n    return gym.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make = importlib.import_module("beside").make
    script = Path(sysconfig.get_path("scripts")) / "distcollect"
    command = [str(script), "worker", "--join", f"127.0.0.1:{port}"]
    with dc.RPCDataCollector(
        make, frames_per_batch=40, num_workers=1, transport="tcp", listen=f"127.0.0.1:{port}"
    ) as collector:
        joined = subprocess.Popen(command, cwd=tmp_path)
        deadline = time.monotonic() + JOIN_S
        while collector.num_workers < 2:
            assert time.monotonic() < deadline
            collector.next()
    assert joined.wait(END_S) == 0
    assert marked.gone(END_S), marked.left()


@pytest.mark.parametrize(
    ("fails", "error", "cause"),
    [("policy", dc.PolicyError, "policy_failed"), ("env", dc.EnvError, "env_failed")],
)
def test_the_ledger_names_what_the_users_code_raised(
    fails: str, error: type[Exception], cause: str
) -> None:
    calls: list[None] = []

    def check(what: str) -> None:
        calls.extend([None] * (what == fails))
        if len(calls) > 7:
            raise ValueError("broken")

    def policy(observation: torch.Tensor) -> torch.Tensor:
        check("policy")
        return torch.zeros(len(observation), dtype=torch.int64)

    class Env(gym.Wrapper):
        def __init__(self) -> None:
            super().__init__(gym.make("CartPole-v1"))

        def step(self, action: Any) -> Any:
            check("env")
            return super().step(action)

    collector = dc.MultiSyncDataCollector(
        [Env], policy, frames_per_batch=20, faults=dc.Faults(max_env_faults=0)
    )
    with pytest.raises(error, match="broken"):
        collector.next()
    total = collector.ledger.total
    assert total.lost == {cause: total.stepped}
    assert total.stepped > 0


def test_what_nobody_can_tell_of_at_the_end_is_in_the_ledger(
    marked: Marked, token_file: Path, port: int
) -> None:
    checker = Checker()
    with collect_with(False, num_workers=1, listen=f"127.0.0.1:{port}") as collector:
        joined = join(port)
        until(collector, checker, lambda: 1 in checker.pids, JOIN_S)
        # As if its host were cut off and the trainer had not noticed.
        stop_process(joined.pid)
        stop_process(checker.pids[1])
    balances(collector, checker)
    joined.send_signal(signal.SIGCONT)
    joined.communicate(timeout=END_S)
    assert 0 < collector.ledger.workers[1].at_most <= 2 * 40
    assert collector.ledger.workers[0].at_most == 0
    assert marked.gone(END_S), marked.left()
