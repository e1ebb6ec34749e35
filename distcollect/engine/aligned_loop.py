"""The hot loop, for envs whose rows all make one transition in each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import STEPPED
from distcollect.engine.rollout_loop import RolloutLoop
from distcollect.envs.base import MANY_ROWS, Faulted, Step
from distcollect.policy.base import Policy
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays


class AlignedLoop(RolloutLoop):
    """Fills rollouts of envs whose rows can be reset at any time, so all rows stay aligned."""

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        num_made = self._make_steps(slab, policy, slab.num_steps)
        if num_made < slab.num_steps:
            slab.pad(np.full(self.envs.num_envs, num_made), self.current)
            return
        for key, array in slab.tail.items():
            array[:] = self.current[key]

    def _make_steps(  # noqa: C901, PLR0912, PLR0915 - calls would cost more than what they do
        self, slab: Slab, policy: Policy, num_steps: int
    ) -> int:
        """Write steps to the beginning of a slab.

        Returns:
            How many; fewer than ``num_steps`` if the rollout ends here, or an env raised and
            :meth:`_recover` says so.
        """
        envs, weights, interrupts = self.envs, self.weights, self.interrupts
        current, lengths = self.current, self.trajectories.lengths
        longest, swaps = self.options.max_frames_per_traj, self.options.swap_within_rollouts
        # Time first: array[step] is found in half the time of array[:, step].
        starts = [(array.swapaxes(0, 1), current[key]) for key, array in slab.root.items()]
        actions = [(leaf.key, slab.action[leaf.key].swapaxes(0, 1)) for leaf in self.layout.action]
        extras = [array.swapaxes(0, 1) for array in slab.extras.values()]
        outcomes = [
            (slab.outcomes[key].swapaxes(0, 1), array) for key, array in envs.outcomes.items()
        ]
        rewards = slab.reward.swapaxes(0, 1)
        slab.policy_version.fill(weights.version)
        slab.traj_ids[:] = self.trajectories.ids[:, None]
        cells, stepped, num_envs = self.counter.cells, self.counter.stepped, envs.num_envs
        clips, recovery = self.options.clip_actions, self.recovery
        step_timer, due, begin, middle = self.step_timer, self.step_timer.due, 0, 0
        action: Arrays = {}
        cut = None
        for step in range(num_steps):
            if interrupts.pending or (weights.pending and swaps):
                if self.between_steps():
                    return step
                slab.policy_version[:, step:] = weights.version
            timed = step >= due
            # Before the policy is called, as it may change its input in place.
            for column, array in starts:
                column[step] = array
            if timed:
                begin = clock_ns()
            chosen, written = policy()
            for (key, column), value in zip(actions, chosen, strict=True):
                column[step] = value
                action[key] = value if value.dtype == column.dtype else column[step]
            # Not strict: a random policy writes no extras.
            for column, value in zip(extras, written, strict=False):
                column[step] = value
            if clips:
                self.clip(action)
            if longest is not None:
                lengths += 1
                cut = lengths >= longest
            if timed:
                middle = clock_ns()
            try:
                result = envs.step(action, cut)
            except Faulted as faulted:
                if not self._recover(slab, step, policy, faulted):
                    return step
                stepped = cells[STEPPED]
                continue
            if timed:
                step_timer.timed(begin, middle, clock_ns(), step_timer.stride)
                due = step_timer.due = step + step_timer.stride
            reward, _, _, ended, real = result
            stepped += num_envs if real is None else int(np.count_nonzero(real))
            cells[STEPPED] = stepped
            rewards[step] = reward
            for column, array in outcomes:
                column[step] = array
            if ended or real is not None:
                if recovery.streaks:
                    recovery.episodes_ended(ended)
                self._end_trajectories(slab, step, result)
        return num_steps

    def _end_trajectories(self, slab: Slab, step: int, result: Step) -> None:
        rows, trajectories = result.ended, self.trajectories
        if len(rows) < MANY_ROWS:
            for row in rows:
                slab.terminated[row, step] = result.terminated[row]
                slab.truncated[row, step] = result.truncated[row]
                slab.add_final(row, step, self.final)
                slab.traj_ids[row, step + 1 :] = trajectories.new_id(row)
                trajectories.lengths[row] = 0
        else:
            at = np.array(rows)
            slab.terminated[at, step] = result.terminated[at]
            slab.truncated[at, step] = result.truncated[at]
            slab.add_finals(at, step, {key: array[at] for key, array in self.final.items()})
            slab.traj_ids[at, step + 1 :] = trajectories.new_ids(at)[:, None]
            trajectories.lengths[at] = 0
        # A filler step does not belong to the episode that follows it.
        fillers = [] if result.real is None else np.flatnonzero(~result.real).tolist()
        trajectories.reset_policy([*rows, *fillers])
        self.envs.finish_resets()

    def _recover(self, slab: Slab, step: int, policy: Policy, faulted: Faulted) -> bool:
        """Replace the envs that raised, until every row has made its transition of this step.

        Returns:
            True if every row has made it; False: no row has, and the caller of :meth:`_make_steps`
            replaces the envs.
        """
        result, longest = faulted.result, self.options.max_frames_per_traj
        rows: Sequence[int] = range(self.envs.num_envs)
        while True:
            self.counter.add(len(rows) - len(faulted.not_stepped))
            slab.faulted[faulted.cut_short, step] = True
            ended = {*rows}.intersection(result.ended)
            self.recovery.episodes_ended(ended.difference(faulted.cut_short))
            for fault in faulted.faults:
                self.recovery.rebuild(fault)
            rows = faulted.not_stepped
            if not rows:
                break
            self._begin_trajectories(slab, step, rows)
            action = self._choose_actions_again(slab, step, policy, rows)
            cut = None if longest is None else self.trajectories.lengths >= longest
            try:
                self.envs.step(action, cut, rows)
            except Faulted as another:
                faulted = another
            else:
                self.counter.add(len(rows))
                self.recovery.episodes_ended({*rows}.intersection(result.ended))
                break
        slab.reward[:, step] = result.reward
        for key, column in slab.outcomes.items():
            column[:, step] = self.envs.outcomes[key]
        self._end_trajectories(slab, step, result)
        return True

    def _begin_trajectories(self, slab: Slab, step: int, rows: Sequence[int]) -> None:
        """End the trajectories of ``rows`` before this step, and begin new ones with it."""
        starts = {key: column[:, step] for key, column in slab.root.items()}
        trajectories = self.trajectories
        for row in rows:
            # Otherwise the trajectory ended by itself, or all its frames were delivered before.
            if step and slab.traj_ids[row, step - 1] == trajectories.ids[row]:
                slab.truncated[row, step - 1] = True
                slab.faulted[row, step - 1] = True
                slab.add_final(row, step - 1, starts)
            slab.traj_ids[row, step:] = trajectories.new_id(row)
            trajectories.lengths[row] = 1
        trajectories.reset_policy(rows)

    def _choose_actions_again(
        self, slab: Slab, step: int, policy: Policy, rows: Sequence[int]
    ) -> Arrays:
        """Write the start of the frame of ``rows`` again; the actions of all rows."""
        obs = self.envs.obs
        for key, column in slab.root.items():
            column[rows, step] = self.current[key][rows]
        before = {key: array.copy() for key, array in obs.items()}
        chosen, written = policy(rows)
        # The policy may have changed its input in place; other rows' is still to be recorded.
        for key, array in obs.items():
            array[:] = before[key]
        for leaf, value in zip(self.layout.action, chosen, strict=True):
            slab.action[leaf.key][rows, step] = value[rows]
        for leaf, value in zip(self.layout.extras, written, strict=False):
            slab.extras[leaf.key][rows, step] = value[rows]
        action = {leaf.key: slab.action[leaf.key][:, step] for leaf in self.layout.action}
        self.clip(action)
        return action
