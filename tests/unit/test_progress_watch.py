"""Which processes are taken to hang."""

from __future__ import annotations

import pytest

from distcollect.common.step_counter import STEPPED, SharedStepCounter, StepCounter, Task
from distcollect.launch.local_processes import ProgressWatch


class World:
    """A process that counts, and a watch with a limit of 10 s for a step."""

    def __init__(self, step_timeout_s: float | None = 10) -> None:
        self.shared = SharedStepCounter()
        self.counter = StepCounter(self.shared._memory[:8])
        self.watch = ProgressWatch(step_timeout_s)
        self.shared.close()

    def overdue(self, now: float) -> str:
        return self.watch.overdue(self.shared.blocks(), now)


def test_idle_processes_may_take_as_long_as_they_like() -> None:
    world = World()
    assert [world.overdue(now) for now in (0, 100, 1000)] == [""] * 3


def test_a_step_that_takes_too_long() -> None:
    world = World()
    with world.counter.doing(Task.COLLECT):
        assert [world.overdue(now) for now in (0, 9)] == [""] * 2
        world.counter.add(1)
        assert [world.overdue(now) for now in (10, 19)] == [""] * 2
        assert world.overdue(20.5) == "its envs finished no step within 10.5 s"
    assert world.overdue(21) == ""
    assert world.shared.stepped == 1


def test_an_evaluation_makes_progress_by_its_own_steps() -> None:
    world = World()
    evaluation = world.counter.evaluation
    assert evaluation is not None
    with world.counter.doing(Task.EVALUATE, 5), evaluation.doing(Task.COLLECT):
        for now in range(0, 100, 9):
            assert world.overdue(now) == ""
            evaluation.add(1)
        assert world.overdue(100) == ""
        assert world.overdue(110) == "its envs finished no step within 10.0 s, in an evaluation"
    assert world.shared.stepped == 0, "these frames are not collected"


def test_making_the_envs_of_an_evaluation() -> None:
    """They have as long as the evaluation, but at least as long as a step."""
    world = World()
    for limit_s, took_s in ((30, 30), (1, 10)):
        with world.counter.doing(Task.EVALUATE, limit_s):
            assert [world.overdue(now) for now in (0, took_s - 1)] == [""] * 2
            assert "no progress with an evaluation" in world.overdue(took_s)
        world.overdue(took_s)


def test_a_call_has_a_limit_of_its_own_also_between_steps() -> None:
    for step_timeout_s in (10, None):
        world = World(step_timeout_s)
        with world.counter.doing(Task.COLLECT):
            for limit_s in (3, 30):
                with world.counter.doing(Task.CALL, limit_s):
                    assert [world.overdue(now) for now in (0, limit_s - 1)] == [""] * 2
                    assert "called did not end within" in world.overdue(limit_s)
                assert world.overdue(limit_s) == ""
            world.counter.cells[STEPPED] += 1
            assert world.overdue(50) == ""
            assert bool(world.overdue(60)) is (step_timeout_s is not None)


@pytest.mark.parametrize(("task", "told"), [(Task.SET_UP, "seed"), (Task.HOOK, "collect_hook")])
def test_tasks_without_steps(task: Task, told: str) -> None:
    world = World()
    with world.counter.doing(task):
        assert world.overdue(0) == ""
        assert told in world.overdue(10)
