"""The loop for envs that are stepped one by one, while an inference server has the policy.

While it steps one half of the envs, the server computes the actions of the other half.
"""

from __future__ import annotations

from distcollect.common.clock import clock_ns
from distcollect.engine.aligned_loop import AlignedLoop
from distcollect.envs.base import Fault, Faulted, Step
from distcollect.inference.remote_policy import RemotePolicy
from distcollect.policy.base import Policy
from distcollect.rollout.slab import Slab


class HalvesLoop(AlignedLoop):
    """Steps the envs in two halves; the frames are those of an :class:`AlignedLoop`."""

    def _make_steps(self, slab: Slab, policy: Policy, num_steps: int) -> int:
        if not isinstance(policy, RemotePolicy):
            return super()._make_steps(slab, policy, num_steps)
        steps = _Steps(self, slab, policy, num_steps)
        try:
            return self.engine.make_steps(
                slab,
                num_steps,
                choose=steps.choose,
                step_envs=steps.step_envs,
                record=self.recorder(slab),
                recover=lambda step, faulted: self._recover(slab, step, policy, faulted),
            )
        finally:
            policy.forget_requests()


class _Steps:
    """The steps of a rollout, each in two halves."""

    def __init__(self, loop: HalvesLoop, slab: Slab, policy: RemotePolicy, num_steps: int) -> None:
        self._loop, self._slab, self._policy = loop, slab, policy
        self._engine, self._envs, self._num_steps = loop.engine, loop.envs, num_steps
        count = self._envs.num_envs
        self._halves = range(count // 2), range(count // 2, count)
        by_step = slab.by_step
        self._starts = [(by_step[key], loop.current[key]) for key in slab.root]
        self._written = [by_step[key] for key in (*slab.action, *slab.extras)]

    def choose(self, step: int) -> int:
        """Have the actions of the first half; returns the step."""
        for half in self._halves:
            if not self._policy.is_asked(half):
                self._ask(half, step)
        self._take(self._halves[0], step, may_wake=True)
        return step

    def step_envs(self, step: int) -> Step:
        """Step one half after the other, each once its actions are there.

        Raises:
            Faulted: envs raised; all others made their step.
        """
        self._envs.begin_parts()
        faults: list[Fault] = []
        cut_short: list[int] = []
        first, second = self._halves
        result = self._step(first, step, faults, cut_short)
        begin = clock_ns()
        try:
            self._take(second, step, may_wake=False)
        except BaseException:
            stepped = {row for fault in faults if not fault.stepped for row in fault.rows}
            self._engine.counter.add(len({*first} - stepped))
            raise
        self._engine.step_timer.waited(clock_ns() - begin)
        result = self._step(second, step, faults, cut_short)
        if faults:
            raise Faulted(faults, cut_short, result)
        return result

    def _step(self, half: range, step: int, faults: list[Fault], cut_short: list[int]) -> Step:
        slab, loop = self._slab, self._loop
        action = loop.clipped({key: slab.by_step[key][step] for key in slab.action})
        try:
            result = self._envs.step(action, half)
        except Faulted as faulted:
            faults += faulted.faults
            cut_short += faulted.cut_short
            return faulted.result
        if step + 1 < self._num_steps:
            self._ask(half, step + 1)
        return result

    def _ask(self, half: range, step: int) -> None:
        rows = slice(half.start, half.stop)
        for column, array in self._starts:
            column[step, rows] = array[rows]
        self._policy.ask(half)

    def _take(self, half: range, step: int, *, may_wake: bool) -> None:
        rows = slice(half.start, half.stop)
        values = self._policy.take(half, may_wake=may_wake)
        for column, value in zip(self._written, values, strict=False):
            column[step, rows] = value
        self._slab.policy_version[rows, step] = self._policy.version
