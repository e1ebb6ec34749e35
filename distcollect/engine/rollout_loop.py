"""What the loops that fill rollouts have in common, and the trajectories they write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from gymnasium.spaces import Box

from distcollect.engine.base import EngineBase
from distcollect.engine.ragged_buffer import RaggedBuffer
from distcollect.envs.base import EnvBatch
from distcollect.errors import ArgumentError
from distcollect.policy.base import Policy
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays, Key


class Trajectories:
    """The trajectory that each of n envs is in.

    Attributes:
        ids: int64 ``[n]``.
        lengths: int64 ``[n]``, frames of the trajectory so far; only counted where
            ``max_frames_per_traj`` limits them.
    """

    def __init__(self, num_envs: int, new_ids: Iterator[int], policy: Policy | None) -> None:
        """Begin a trajectory in each env.

        Args:
            num_envs: n.
            new_ids: the ids of new trajectories.
            policy: it is told where an episode begins.
        """
        self.ids = np.zeros(num_envs, np.int64)
        self.lengths = np.zeros(num_envs, np.int64)
        self._new_ids = new_ids
        self._policy = policy
        self._rests: set[int] = set()
        self.begin_all()

    def use_ids(self, new_ids: Iterator[int]) -> None:
        """Take ids from ``new_ids`` from now on, for the trajectories under way as well."""
        self._new_ids = new_ids
        self.new_ids(np.arange(len(self.ids)))

    def new_id(self, row: int) -> int:
        """Give the row's trajectory the next id, and return it."""
        traj_id = next(self._new_ids)
        self.ids[row] = traj_id
        return traj_id

    def new_ids(self, rows: np.ndarray) -> np.ndarray:
        """Give the trajectory of each of these rows the next id, and return the ids."""
        traj_ids = np.fromiter(self._new_ids, np.int64, len(rows))
        self.ids[rows] = traj_ids
        return traj_ids

    def begin(self, rows: np.ndarray) -> None:
        """Begin a new trajectory in each of these rows."""
        self.new_ids(rows)
        self.lengths[rows] = 0

    def cut_before(self, rows: np.ndarray, last_ids: np.ndarray) -> None:
        """Frames of ``rows`` were dropped: what follows of their episodes are new trajectories.

        Args:
            rows: int64 ``[m]``.
            last_ids: int64 ``[m]``, the trajectory of the last frame that was dropped in each row.
                Where another one has begun since, it begins with an episode, and stays as it is.
        """
        rows = rows[self.ids[rows] == last_ids]
        self.begin(rows)
        self._rests.update(self.ids[rows].tolist())

    def rests_in(self, traj_ids: np.ndarray) -> tuple[int, ...]:
        """Those of the next rollout's ``traj_ids`` ``[n, T]`` that are the rest of an episode."""
        if not self._rests:
            return ()
        present = self._rests.intersection(np.unique(traj_ids).tolist())
        oldest = int(traj_ids[:, -1].min())  # a row's ids only rise
        self._rests = {traj_id for traj_id in self._rests if traj_id >= oldest}
        return tuple(present)

    def begin_all(self) -> None:
        """Begin an episode, and thus a trajectory, in every row."""
        self.begin(np.arange(len(self.ids)))
        self.reset_policy(range(len(self.ids)))

    def reset_policy(self, rows: Sequence[int]) -> None:
        """Episodes begin in ``rows``: the policy must not remember the ones before."""
        if self._policy is not None:
            self._policy.begin(rows)


class RolloutLoop(ABC):
    """Steps the n envs of an engine with a policy and writes the frames of a rollout.

    What it has of the engine is described there.

    Attributes:
        between_steps: see :meth:`.EngineBase.between_steps`.
        policy_state: what a recurrent policy carries from frame to frame, None if it is not one.
        trajectories: the trajectory of each env.
        current: ``{key: [n, *shape]}`` of the state leaves as they are before the next frame.
            The arrays belong to the envs and the policy, which rewrite them in place.
        final: the same after the last frame of an episode; valid for rows that just ended.
    """

    # The frames that wait for the next rollout, of loops whose rows are not at the same step.
    _buffer: RaggedBuffer | None = None

    def __init__(
        self, engine: EngineBase, policy_state: PolicyState | None, trajectories: Trajectories
    ) -> None:
        """Step the envs of ``engine``, whose layout is known."""
        self.envs = engine.envs
        self.layout = engine.layout
        self.options = engine.options
        self.weights = engine.weights
        self.counter = engine.counter
        self.step_timer = engine.step_timer
        self.recovery = engine.recovery
        self.interrupts = engine.interrupts
        self.between_steps = engine.between_steps
        self.policy_state = policy_state
        self.trajectories = trajectories
        of_state = policy_state.arrays if policy_state is not None else {}
        self.current: Arrays = {**self.envs.obs, **of_state}
        self.final: Arrays = {**self.envs.final, **of_state}
        self._bounds = action_bounds(self.envs) if self.options.clip_actions else {}

    @abstractmethod
    def fill(self, slab: Slab, policy: Policy, *, fresh: bool) -> None:
        """Write the next rollout to ``slab``; if it is preempted, the rest is padding.

        Args:
            slab: a cleared slab of this layout.
            policy: chooses the actions.
            fresh: leave out frames from before this call.
        """

    @property
    def num_waiting(self) -> int:
        """Number of frames that wait for the next rollout."""
        return 0 if self._buffer is None else int(self._buffer.position.sum())

    def drop_waiting(self) -> int:
        """Drop the frames that wait for the next rollout, and return their number.

        All envs are reset before the next one.
        """
        return 0 if self._buffer is None else self._buffer.drop()

    def _buffer_for(self, num_steps: int, *, fresh: bool) -> RaggedBuffer:
        """Return the buffer for a rollout of ``num_steps`` steps; see :meth:`fill`.

        It may be another number than that of the last rollout only if all envs were reset since.
        """
        if self._buffer is None or self._buffer.num_steps != num_steps:
            self._buffer = RaggedBuffer(self.layout, num_steps)
        elif fresh:
            # A trajectory can't span the gap that dropped frames leave.
            self.trajectories.cut_before(*self._buffer.last_ids())
            self.counter.lose("row_skew", self._buffer.drop())
        return self._buffer

    def clip(self, action: Arrays) -> None:
        """Clip ``action`` to the bounds of its space, if the options ask for that."""
        for key, (low, high) in self._bounds.items():
            action[key] = np.clip(action[key], low, high)


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
