"""The loop for envs whose rows all make one transition in each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from gymnasium.spaces import Box

from distcollect.common.step_counter import STEPPED
from distcollect.engine.base import EngineBase
from distcollect.engine.trajectories import Trajectories
from distcollect.envs.base import EnvBatch, Faulted, Step
from distcollect.errors import ArgumentError
from distcollect.policy.base import Policy, Renewed
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays, Key


class AlignedLoop:
    """Steps the n envs of an engine with a policy, and writes the frames of a rollout.

    Attributes:
        engine: the engine; its layout is known.
        envs: its envs. Their rows can be reset at any time, so that all rows stay aligned.
        policy: the policy, which is told where an episode begins.
        trajectories: the trajectory of each env.
        current: ``{key: [n, *shape]}`` of the state leaves as they are before the next frame.
            The arrays belong to the envs and the policy, which rewrite them in place.
        final: the same after the last frame of an episode; valid for rows that just ended.
    """

    def __init__(self, engine: EngineBase, policy: Policy, trajectories: Trajectories) -> None:
        self.engine = engine
        self.envs: EnvBatch = engine.envs
        self.policy = policy
        self.trajectories = trajectories
        policy.begin(range(self.envs.num_ready))  # it was tried out
        of_state = policy.state.carried if policy.state is not None else {}
        self.current: Arrays = {**self.envs.obs, **of_state}
        self.final: Arrays = {**self.envs.final, **of_state}
        self._bounds = action_bounds(self.envs) if engine.options.clip_actions else {}

    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        """Write the next rollout to ``slab``; if it is preempted, the rest is padding.

        Args:
            slab: a cleared slab of this layout.
            policy: chooses the actions.
            fresh: leave out frames from before this call.
        """
        num_made = self._make_steps(slab, policy, slab.num_steps)
        slab.traj_ids[:] = self.trajectories.following(slab.ended)
        if num_made < slab.num_steps:
            slab.pad(np.full(self.envs.num_envs, num_made), self.current)
            return
        for key, array in slab.tail.items():
            array[:] = self.current[key]

    @property
    def num_waiting(self) -> int:
        """Number of frames that wait for the next rollout."""
        return 0

    def drop_waiting(self) -> int:
        """Drop the frames that wait for the next rollout, and return their number.

        All envs are reset before the next one.
        """
        return 0

    def renew_states(self) -> None:
        """Weights may be new: compute the policy's state again in rows that have just begun."""
        if self.policy.state is not None:
            self.policy.state.renew()

    def begin_all(self) -> None:
        """Begin an episode, and thus a trajectory, in every row."""
        self.trajectories.begin(range(self.envs.num_envs))
        self._forget(range(self.envs.num_ready))

    def _make_steps(self, slab: Slab, policy: Policy, num_steps: int) -> int:
        """Write steps to the beginning of a slab; returns how many."""
        envs, current, by_step = self.envs, self.current, slab.by_step
        starts = [(by_step[key], current[key]) for key in slab.root]
        actions = [(key, by_step[key]) for key in slab.action]
        extras = [by_step[key] for key in slab.extras]
        action: Arrays = {}

        def choose(step: int) -> Arrays:
            # Before the policy is called, which changes its state.
            for column, array in starts:
                column[step] = array
            chosen, written = policy()
            for (key, column), value in zip(actions, chosen, strict=False):
                column[step] = value
                action[key] = value if value.dtype is column.dtype else column[step]
            # Not strict: a random policy writes no extras.
            for column, value in zip(extras, written, strict=False):
                column[step] = value
            return self.clipped(action) if self._bounds else action

        is_local = self.engine.options.link is None
        return self.engine.make_steps(
            slab,
            num_steps,
            choose=choose if is_local else partial(self.engine.choose_elsewhere, slab, choose),
            step_envs=envs.step,
            record=self.recorder(slab),
            recover=lambda step, faulted: self._recover(slab, step, policy, faulted),
        )

    def recorder(self, slab: Slab) -> Callable[[int, Step], None]:
        """A function that writes the result of a step to a slab, and counts its frames."""
        envs, by_step, recovery = self.envs, slab.by_step, self.engine.recovery
        outcomes = [(by_step[key], array) for key, array in envs.outcomes.items()]
        rewards, num_rows = by_step["reward",], envs.num_ready
        cells = self.engine.counter.cells

        def record(step: int, result: Step) -> None:
            reward, _, _, ended, real = result
            rewards[step] = reward
            for column, array in outcomes:
                column[step] = array
            # At once, as the policy may raise where an episode begins.
            cells[STEPPED] += num_rows if real is None else int(np.count_nonzero(real))
            if real is None and not ended:
                return
            if recovery.streaks:
                recovery.episodes_ended(envs.rows[ended].tolist())
            self._end_episodes(slab, step, result)

        return record

    def _end_episodes(self, slab: Slab, step: int, result: Step) -> None:
        """Record which rows ended in a step, and after which observations."""
        slab.by_step["terminated",][step] = result.terminated
        slab.by_step["truncated",][step] = result.truncated
        slab.end(result.ended, step, self.final)
        self._forget(result.ended)
        self.envs.finish_resets()

    def _forget(self, rows: Sequence[int]) -> None:
        """Episodes begin in ``rows``: the policy must not remember the ones before."""
        self.policy.begin(rows)

    def _recover(self, slab: Slab, step: int, policy: Policy, faulted: Faulted) -> int | None:
        """Replace the envs that raised, until every row has made its transition of this step.

        Returns:
            The next step.
        """
        counter, recovery, result = self.engine.counter, self.engine.recovery, faulted.result
        rows: Sequence[int] = range(self.envs.num_envs)
        while True:
            counter.add(len(rows) - len(faulted.not_stepped))
            slab.faulted[faulted.cut_short, step] = True
            ended = {*rows}.intersection(result.ended)
            recovery.episodes_ended(ended.difference(faulted.cut_short))
            recovery.rebuild_all(faulted.faults)
            rows = faulted.not_stepped
            if not rows:
                break
            self._begin_trajectories(slab, step, rows)
            action = self._choose_actions_again(slab, step, policy, rows)
            try:
                self.envs.step(action, rows)
            except Faulted as another:
                faulted = another
            else:
                counter.add(len(rows))
                recovery.episodes_ended({*rows}.intersection(result.ended))
                break
        slab.reward[:, step] = result.reward
        for key, column in slab.outcomes.items():
            column[:, step] = self.envs.outcomes[key]
        self._end_episodes(slab, step, result)
        return step + 1

    def _begin_trajectories(self, slab: Slab, step: int, rows: Sequence[int]) -> None:
        """End the trajectories of ``rows`` before this step, and begin new ones with it."""
        if step:
            cut = np.array([row for row in rows if not slab.ended[row, step - 1]], np.int64)
            slab.truncated[cut, step - 1] = True
            slab.faulted[cut, step - 1] = True
            starts = {key: column[cut, step] for key, column in slab.root.items()}
            slab.add_finals(cut, step - 1, starts)
        else:
            self.trajectories.begin(rows)  # all their frames were delivered before
        self._forget(rows)

    def _choose_actions_again(
        self, slab: Slab, step: int, policy: Policy, rows: Sequence[int]
    ) -> Arrays:
        """Write the start of the frame of ``rows`` again; the actions of all rows."""
        layout = self.engine.layout
        while True:
            for key, column in slab.root.items():
                column[rows, step] = self.current[key][rows]
            with contextlib.suppress(Renewed):
                chosen, written = policy(rows)
                break
        slab.policy_version[rows, step] = self.engine.weights.version
        slab.policy_version[:, step + 1 :] = self.engine.weights.version  # a server's may be newer
        for leaf, value in zip(layout.action, chosen, strict=True):
            slab.action[leaf.key][rows, step] = value[rows]
        for leaf, value in zip(layout.extras, written, strict=False):
            slab.extras[leaf.key][rows, step] = value[rows]
        return self.clipped({key: column[:, step] for key, column in slab.action.items()})

    def clipped(self, action: Arrays) -> Arrays:
        """Clip ``action`` to the bounds of its space, if the options ask for that."""
        for key, (low, high) in self._bounds.items():
            action[key] = np.clip(action[key], low, high)
        return action


def action_bounds(envs: EnvBatch) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    """The bounds of a Box action space, by the key of its only leaf.

    Raises:
        ArgumentError: the action space is not a Box.
    """
    if len(envs.action_leaves) == 1 and isinstance(envs.action_space, Box):
        return {envs.action_leaves[0].key: (envs.action_space.low, envs.action_space.high)}
    raise ArgumentError(
        f"clip_actions needs a Box action space, not {envs.action_space}: leave it out"
    )
