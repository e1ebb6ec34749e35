"""Ctrl-C, in whichever line it comes, leaves nothing half-changed, and is never lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.envs import Counting
from helpers.interrupting import ALL_LINES, LineTracer, interrupted_at, sampled
from helpers.loopback_pool import loopback_collector
from helpers.policies import ShownWeight as Policy
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc

# Of a call with more lines, so many are tried, unless all are to be.
SAMPLE = None if os.environ.get(ALL_LINES) else 12


def lines_of(call: Callable[[], object]) -> list[int]:
    """The lines of a call to try."""
    tracer = LineTracer(0, lambda: None)
    with tracer.tracing():
        call()
    # Waiting takes a varying number of lines.
    return sampled(tracer.num_lines, tracer.num_lines if SAMPLE is None else SAMPLE)


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "next": lambda collector: collector.next(),
    "for": lambda collector: next(iter(collector)),
    "publish": lambda collector: collector.update_policy_weights_(),
    "set_seed": lambda collector: collector.set_seed(5),
    "call": lambda collector: collector.call("told"),
    "evaluate": lambda collector: collector.evaluate(2, seed=1),
    "state_dict": lambda collector: collector.state_dict(),
    "stats": lambda collector: collector.stats(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_run_in_this_process_goes_on_after_an_interrupt_in_any_line(operation: str) -> None:
    """With workers, ``test_operations.py`` has an interrupt among all else that may happen."""
    results: list[Any] = []
    steps: list[float] = []
    with dc.SyncDataCollector(Counting, Policy(), frames_per_batch=3) as collector:

        def call() -> None:
            results.append(OPERATIONS[operation](collector))

        def receive() -> None:
            batches = [result for result in results if isinstance(result, TensorDict)]
            for batch in [*batches, collector.next()]:
                steps.extend(batch["next", "observation"].flatten().tolist())
            results.clear()
            assert len({*steps}) == len(steps) == collector.stats().delivered
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()

        for at in lines_of(call):
            receive()
            _, tracer = interrupted_at(at, call)
            try:
                receive()
            except BaseException as error:
                raise AssertionError(f"after an interrupt at {tracer.where}") from error


class Buffer(KeepingBuffer):
    """A replay buffer that keeps all."""

    @property
    def frames(self) -> list[float]:
        """Numbers of all frames."""
        numbers = [
            1_000_000 * data["collector", "worker_id"] + data["next", "observation"][:, 0]
            for data in self.added
        ]
        return torch.cat(numbers).tolist() if numbers else []

    def check(self) -> None:
        """It has each frame once; frames may be added meanwhile."""
        frames = self.frames
        assert len({*frames}) == len(frames), frames


def test_a_replay_buffer_gets_each_frame_once() -> None:
    """A batch whose delivery was interrupted is added by the next call."""
    buffer = Buffer()
    collector: Any = loopback_collector(
        Counting, None, sync=False, num_workers=2, frames_per_batch=3, replay_buffer=buffer
    )
    with collector:
        for at in lines_of(collector.next):
            interrupted_at(at, collector.next)
            collector.next()
            buffer.check()
            assert collector.ledger.total.delivered == len(buffer.frames)


def test_trajectories_lose_no_part() -> None:
    collector: Any = loopback_collector(
        Counting, None, sync=False, num_workers=1, frames_per_batch=4, trajs_per_batch=1
    )
    with collector:
        frames = []
        for at in lines_of(collector.next):
            interrupted_at(at, collector.next)
            batch = collector.next()
            frames += batch["next", "observation"].flatten().tolist()
            assert len(frames) % 7 == 0
        # Only whole batches are missing: those that an interrupted call returned without an end.
        assert len({*frames}) == len(frames)
        assert collector.abandoned_frames == 0


def filling(in_process: bool, policy: Policy | None = None, **settings: Any) -> tuple[Any, Buffer]:
    """A collector, and the buffer that it fills after ``start()``."""
    buffer = Buffer()
    kwargs: dict[str, Any] = {"frames_per_batch": 3, "replay_buffer": buffer, **settings}
    if in_process:
        return dc.SyncDataCollector(Counting, policy, **kwargs), buffer
    return loopback_collector(Counting, policy, sync=False, num_workers=1, **kwargs), buffer


@pytest.mark.parametrize("in_process", [True, False])
def test_a_batch_that_is_made_during_a_shutdown_goes_nowhere(in_process: bool) -> None:
    """The ledger counts its frames as lost, so the buffer doesn't get them."""
    is_making, may_go_on = threading.Event(), threading.Event()

    def postproc(batch: TensorDict) -> TensorDict:
        is_making.set()
        may_go_on.wait(60)
        return batch

    collector, buffer = filling(in_process, postproc=postproc)
    collector.start()
    assert is_making.wait(60)
    if in_process:  # there a shutdown waits for the batch
        threading.Timer(0.2, may_go_on.set).start()
    collector.shutdown()
    may_go_on.set()
    eventually(lambda: not collector.is_running)
    assert buffer.frames == []
    assert collector.stats().lost.keys() == {"shut_down"}


def grows(buffer: Buffer, about: Callable[[], object] = lambda: None) -> None:
    count = len(buffer.frames)
    eventually(lambda: len(buffer.frames) > count, about=about)


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("operation", ["start", "pause", "async_shutdown", "shutdown"])
def test_collecting_in_the_background_goes_on(operation: str, in_process: bool) -> None:
    """And ends, by the same call once more."""

    def pause(collector: Any) -> None:
        with collector.pause(60):
            pass

    call: Callable[[Any], None] = {
        "start": lambda collector: collector.start(),
        "pause": pause,
        "async_shutdown": lambda collector: collector.async_shutdown(timeout=60),
        "shutdown": lambda collector: collector.shutdown(),
    }[operation]

    def interrupt_at(at: int) -> bool:
        collector, buffer = filling(in_process)
        try:
            if operation != "start":
                collector.start()
                grows(buffer)
            more, tracer = interrupted_at(at, lambda: call(collector))
            assert torch.is_grad_enabled(), tracer.where
            if operation in ("start", "pause"):
                assert collector.is_running, tracer.where
                grows(buffer, lambda: tracer.where)
            else:
                call(collector)
                eventually(lambda: not collector.is_running, about=lambda: tracer.where)
            buffer.check()
            return more
        finally:
            collector.shutdown()

    at = 1
    while interrupt_at(at):
        at += 1 if SAMPLE is None else 41


# Where it is raised.


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Pressing(Counting):
    """In its fourth step Ctrl-C comes, and the step after that says so."""

    reached: ClassVar[list[str]] = []

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.stepped == 4:
            press_ctrl_c()
            self.reached.append("after")
        return super().step(action)


def test_in_the_users_own_code_it_is_raised_at_once() -> None:
    Pressing.reached.clear()
    with dc.SyncDataCollector(Pressing, frames_per_batch=100) as collector:
        with pytest.raises(KeyboardInterrupt) as caught:
            collector.next()
        assert "step" in [line.name for line in caught.traceback]
        assert Pressing.reached == []
        assert collector.stats().lost == {"interrupted": 4}


class Held(Counting):
    """Steps when it may."""

    may_step = threading.Event()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.may_step.wait(60)
        return super().step(action)


@pytest.mark.parametrize("waits", ["workers", "evaluations", "in process"])
def test_a_call_that_waits_ends_at_once(waits: str) -> None:
    """By Ctrl-C that comes while our own code runs, not after half a second."""

    Held.may_step.clear()
    soon = threading.Timer(0.3, press_ctrl_c)
    if waits == "in process":
        with dc.SyncDataCollector(Counting, frames_per_batch=10_000_000) as collector:
            began = time.monotonic()
            soon.start()
            with pytest.raises(KeyboardInterrupt):
                collector.next()
    else:
        with loopback_collector(Held, Policy(), frames_per_batch=6, num_workers=2) as collector:
            began = time.monotonic()
            soon.start()
            call = collector.next if waits == "workers" else partial(collector.evaluate, 10**6)
            with pytest.raises(KeyboardInterrupt) as caught:
                call()
            Held.may_step.set()
            collector.next(timeout_s=20)  # the workers play no more of the episodes
    assert time.monotonic() - began < 5
    if waits == "workers":
        assert len(caught.traceback) <= 3  # no more of our lines than the call


def test_the_handler_is_there_while_a_collector_is_open() -> None:
    default = signal.getsignal(signal.SIGINT)
    with dc.SyncDataCollector(Counting, frames_per_batch=6):
        ours = signal.getsignal(signal.SIGINT)
        assert ours is not default
        with dc.SyncDataCollector(Counting, frames_per_batch=6):
            pass
        assert signal.getsignal(signal.SIGINT) is ours
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is default


@pytest.mark.parametrize("call", ["next", "shutdown"])
def test_the_handler_is_there_again_in_the_next_cell_of_a_notebook(call: str) -> None:
    """A notebook ignores Ctrl-C between two cells, and sets Python's handler before each."""
    handlers = []

    class Looking(Counting):
        def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            handlers.append(signal.getsignal(signal.SIGINT))
            return super().step(action)

        def close(self) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    default = signal.getsignal(signal.SIGINT)
    try:
        with dc.SyncDataCollector(Looking, frames_per_batch=6) as collector:
            for handler in (signal.SIG_IGN, default):
                signal.signal(signal.SIGINT, handler)
            handlers.clear()
            getattr(collector, call)()
            assert handlers
            assert default not in handlers
        assert signal.getsignal(signal.SIGINT) is default
    finally:
        signal.signal(signal.SIGINT, default)


def test_a_handler_of_the_users_stays() -> None:
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with dc.SyncDataCollector(Counting, frames_per_batch=6) as collector:
            press_ctrl_c()
            collector.next()
    finally:
        assert callable(signal.signal(signal.SIGINT, before))
    assert pressed == [1]


def collect_on(collector: Any, alarm_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    while True:
        collector.next()


def test_what_other_handlers_raise_ends_the_wait_and_leaves_nothing() -> None:
    """It may come in any line, so of frames nothing is promised: all ends, and nothing hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError("the user's")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for after_s in (0.001, 0.003, 0.01, 0.05):
            num_threads = threading.active_count()
            with (
                loopback_collector(Counting, frames_per_batch=6, num_workers=2) as collector,
                # In this process it may come in a worker's code, which reports it.
                pytest.raises((TimeoutError, dc.WorkerError), match="the user's"),
            ):
                collect_on(collector, after_s)
            eventually(lambda n=num_threads: threading.active_count() <= n + 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_interrupts_the_pool_may_shut_down() -> None:
    """It does not wait for what it has interrupted, which may hold the pool's lock."""

    def stop(_: int, frame: FrameType | None) -> None:
        modules = []
        while frame is not None:
            modules.append(frame.f_globals["__name__"])
            frame = frame.f_back
        if modules[0].startswith("distcollect.pool") and "distcollect.pool.event_loop" in modules:
            collector.shutdown()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with (
            loopback_collector(Counting, frames_per_batch=6, num_workers=2) as collector,
            pytest.raises(dc.CollectorStateError, match="the collector was shut down"),
        ):
            collect_on(collector, 0.001)
        assert collector.ledger.total.open == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_interrupts_the_counting_reads_no_figures_or_all() -> None:
    """A worker's thread has the pool's lock, and waits for what was interrupted."""
    outcomes: list[str] = []

    def look(_: int, frame: FrameType | None) -> None:
        if frame is None or frame.f_globals["__name__"] != "distcollect.telemetry.recorder":
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            return
        time.sleep(0.1)  # meanwhile the workers finish what they were asked for
        try:
            outcomes.append(type(collector.ledger).__name__)
        except dc.CollectorStateError as error:
            outcomes.append(str(error))

    before = signal.signal(signal.SIGALRM, look)
    try:
        with loopback_collector(Counting, frames_per_batch=6, num_workers=2) as collector:
            while not any("note the signal there" in outcome for outcome in outcomes):
                num_seen = len(outcomes)
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while len(outcomes) == num_seen:
                    collector.next()
        assert set(outcomes[:-1]) <= {"LedgerReport"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
