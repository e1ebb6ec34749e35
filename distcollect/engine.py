"""Steps envs with a policy and writes every frame in place. Used by all collectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box

from .envs import EnvBatch, Step
from .errors import ArgumentError, PolicyError
from .flat import LiveWeights
from .policy import Policy, RandomPolicy
from .rollout import Layout, Slab
from .spaces import Arrays, Key


class Stopped(Exception):
    """Collection was ended between two steps by :meth:`Engine.stop`."""


_CAUSES: dict[type[BaseException], str] = {
    Stopped: "shut_down",
    KeyboardInterrupt: "interrupted",
    PolicyError: "policy_failed",
}


@dataclass(frozen=True)
class StepOptions:
    """How envs are stepped.

    Attributes:
        max_frames_per_traj: truncate a trajectory after so many frames; None: never.
        reset_at_each_iter: start every rollout with a reset of all envs.
        clip_actions: clip what goes to the envs to a Box action space's bounds; the batch keeps
            the action as the policy chose it.
        swap_within_rollouts: take new weights in between any two steps; else between rollouts.
    """

    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    clip_actions: bool = False
    swap_within_rollouts: bool = True


class Counts:
    """Frames stepped in all, and those of them that are in no rollout, by cause.

    Attributes:
        memory: int64 ``[2]``: frames stepped, up to date after every step; and 1 while envs are
            stepped or reset for a rollout, else 0. It may be shared with a process that wants to
            know when this one was killed.
        cells: the same, several times faster to write to.
        lost: frames that will never be delivered, by cause.
    """

    def __init__(self, memory: np.ndarray | None = None) -> None:
        """Go on from what stands in ``memory``; None: from 0, in memory of its own."""
        self.memory = np.zeros(2, np.int64) if memory is None else memory
        self.cells = self.memory.data
        self.lost: dict[str, int] = {}

    @property
    def stepped(self) -> int:
        """Frames stepped in all."""
        return int(self.cells[0])

    def add(self, frames: int) -> None:
        """Account for ``frames`` that were stepped."""
        self.cells[0] += frames

    def lose(self, cause: str, frames: int) -> None:
        """Account for ``frames`` that will never be delivered."""
        if frames:
            self.lost[cause] = self.lost.get(cause, 0) + frames


class Engine:
    """Collects rollouts ``[n, T]`` from n envs and one policy.

    Not thread-safe, but for :meth:`stop` and the weights, which other threads may hand in at any
    time: both take effect between two steps.
    """

    def __init__(
        self,
        envs: EnvBatch,
        policy: Policy,
        weights: LiveWeights,
        *,
        traj_ids: Iterator[int],
        options: StepOptions | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Reset the envs and call the policy once, which tells what it writes.

        Args:
            envs: n of them.
            policy: bound to ``envs.obs``.
            weights: the policy's.
            traj_ids: where the ids of new trajectories are taken from.
            options: how to step.
            counts: what to count in; None: a new one.

        Raises:
            ArgumentError: an option that these envs can't follow.
            EnvError, PolicyError: see :mod:`.envs` and :mod:`.policy`.
        """
        self.options = options or StepOptions()
        if not envs.can_cut:
            _refuse_cuts(self.options)
        self.weights = weights
        self.counts = counts or Counts()
        self._envs = envs
        self._policy = policy
        self._random = RandomPolicy(envs.action_space, envs.num_envs)
        self._bounds = _bounds(envs) if self.options.clip_actions else {}
        self._stop = False
        self._seeds: Sequence[int] | None = None
        self._new_traj_ids = traj_ids
        self._traj_ids = np.zeros(envs.num_envs, np.int64)
        self._lengths = np.zeros(envs.num_envs, np.int64)
        envs.reset()
        first = {key: array.copy() for key, array in envs.obs.items()}
        policy.try_out()
        # It may have changed its input in place.
        for key, array in envs.obs.items():
            array[:] = first[key]
        self.layout = Layout(envs.num_envs, envs.leaves, envs.action_leaves, policy.extras)
        self._strip: _Strip | None = None
        self._reset_due = False
        self._begun_at = 0  # frames stepped before the rollout under way
        self._begin_trajectories()

    def seed(self, seeds: Sequence[int]) -> None:
        """Start over at the next rollout, env i from ``seeds[i]``."""
        self._seeds = list(seeds)
        self._random.seed(self._seeds)
        if isinstance(self._policy, RandomPolicy):
            self._policy.seed(self._seeds)
        self._reset_due = True

    def stop(self) -> None:
        """Make the running or next :meth:`collect` raise :class:`Stopped` between two steps."""
        self._stop = True

    def collect(self, slab: Slab, *, random: bool = False, fresh: bool = False) -> None:
        """Fill ``slab`` with the next rollout.

        Args:
            slab: of this engine's layout.
            random: draw actions from the action space; the extras are zero then.
            fresh: no frame from before this call, as native vector envs may have some left over.

        Raises:
            Stopped: see :meth:`stop`.
            EnvError, PolicyError: an env or the policy raised.
        """
        cells = self.counts.cells
        cells[1] = 1
        try:
            self._collect(slab, random=random, fresh=fresh)
        except BaseException as error:
            # The frames so far are in no rollout, so what follows starts new trajectories.
            self._break_off(_CAUSES.get(type(error), "env_failed"))
            raise
        finally:
            cells[1] = 0

    def close(self) -> None:
        """Close the envs."""
        self._envs.close()

    def _collect(self, slab: Slab, *, random: bool, fresh: bool) -> None:
        self._begun_at = self.counts.stepped
        if self._reset_due or self.options.reset_at_each_iter:
            self._reset()
        slab.clear_ends()
        policy = self._random if random else self._policy
        if random:
            for array in slab.extras.values():
                array.fill(0)
        with policy.exploring():
            if self._envs.can_cut:
                self._fill(slab, policy)
            else:
                self._fill_skewed(slab, policy, fresh)

    def _reset(self) -> None:
        self._envs.reset(self._seeds)
        self._seeds = None
        self._reset_due = False
        if self._strip is not None:
            self.counts.lose("row_skew", self._strip.drop())
        self._begin_trajectories()

    def _begin_trajectories(self) -> None:
        self._lengths.fill(0)
        for row in range(self._envs.num_envs):
            self._traj_ids[row] = next(self._new_traj_ids)

    def _break_off(self, cause: str) -> None:
        if self._envs.can_cut:
            self.counts.lose(cause, self.counts.stepped - self._begun_at)
        elif self._strip is not None:
            self.counts.lose(cause, self._strip.drop())
        self._reset_due = True

    def _between_steps(self) -> None:
        if self._stop:
            raise Stopped
        self.weights.apply()

    def _fill(self, slab: Slab, policy: Policy) -> None:  # noqa: C901 - see below
        """The hot loop: every env makes one transition in each step.

        In one piece, as calls of its own would cost more than what they do.
        """
        envs, weights, lengths, rewards = self._envs, self.weights, self._lengths, slab.reward
        longest, swaps = self.options.max_frames_per_traj, self.options.swap_within_rollouts
        observations = [(slab.root[key], envs.obs[key]) for key in slab.root]
        actions = [(leaf.key, slab.action[leaf.key]) for leaf in self.layout.action]
        extras = list(slab.extras.values())
        if weights.pending:
            weights.apply()
        slab.policy_version.fill(weights.version)
        slab.traj_ids[:] = self._traj_ids[:, None]
        cells, stepped, num_envs = self.counts.cells, self.counts.stepped, envs.num_envs
        action: Arrays = {}
        cut = None
        for step in range(slab.num_steps):
            if self._stop or (weights.pending and swaps):
                self._between_steps()
                slab.policy_version[:, step:] = weights.version
            # Before the policy sees it, which may change its input in place.
            for column, now in observations:
                column[:, step] = now
            chosen, written = policy()
            for (key, column), tensor in zip(actions, chosen, strict=True):
                value = tensor.numpy()
                column[:, step] = value
                action[key] = value if value.dtype == column.dtype else column[:, step]
            # None are written by random actions.
            for column, tensor in zip(extras, written, strict=False):
                column[:, step] = tensor.numpy()
            if self._bounds:
                self._clip(action)
            if longest is not None:
                lengths += 1
                cut = lengths >= longest
            out = envs.step(action, cut)
            stepped += num_envs
            cells[0] = stepped
            rewards[:, step] = out.reward
            if out.ended:
                self._end_trajectories(slab, step, out)
        for key, array in slab.tail.items():
            array[:] = envs.obs[key]

    def _end_trajectories(self, slab: Slab, step: int, out: Step) -> None:
        for row in out.ended:
            slab.terminated[row, step] = out.terminated[row]
            slab.truncated[row, step] = out.truncated[row]
            slab.add_final(row, step, self._envs.final)
            traj_id = next(self._new_traj_ids)
            self._traj_ids[row] = traj_id
            slab.traj_ids[row, step + 1 :] = traj_id
            self._lengths[row] = 0

    def _clip(self, action: Arrays) -> None:
        for key, (low, high) in self._bounds.items():
            action[key] = np.clip(action[key], low, high)

    def _fill_skewed(self, slab: Slab, policy: Policy, fresh: bool) -> None:
        """As :meth:`_fill`, for envs with filler steps, which make rows drift apart."""
        envs, weights = self._envs, self.weights
        strip = self._strip
        if strip is not None and (fresh or strip.num_steps != slab.num_steps):
            # A trajectory can't span the gap that the surplus leaves.
            for gap in np.flatnonzero(strip.position):
                self._traj_ids[gap] = next(self._new_traj_ids)
            self.counts.lose("row_skew", strip.drop())
        if strip is None or strip.num_steps != slab.num_steps:
            strip = self._strip = _Strip(self.layout, slab.num_steps)
        swaps = True  # before the first step in any case
        while strip.position.min() < slab.num_steps:
            if self._stop or (weights.pending and swaps):
                self._between_steps()
            swaps = self.options.swap_within_rollouts
            before = {key: array.copy() for key, array in envs.obs.items()}
            chosen, written = policy()
            action = {
                leaf.key: tensor.numpy()
                for leaf, tensor in zip(self.layout.action, chosen, strict=True)
            }
            given = dict(action)
            self._clip(given)
            out = envs.step(given)
            real = np.ones(envs.num_envs, bool) if out.real is None else out.real
            self.counts.add(int(real.sum()))
            values: Arrays = {**before, **action}
            for index, leaf in enumerate(self.layout.extras):
                random = not written
                values[leaf.key] = leaf.zeros(envs.num_envs) if random else written[index].numpy()
            values["reward",] = out.reward
            values["terminated",] = out.terminated
            values["truncated",] = out.truncated
            values["traj_ids",] = self._traj_ids
            values["policy_version",] = np.full(envs.num_envs, weights.version)
            overflow = strip.write(real, values, envs, out.ended)
            self.counts.lose("row_skew", len(overflow))
            # A frame that found no room leaves a gap, which no trajectory may span.
            for ended in {*out.ended, *overflow}:
                self._traj_ids[ended] = next(self._new_traj_ids)
        strip.emit(slab)


class _Strip:
    """Frames of rows that are not at the same step: up to 2T of each row."""

    def __init__(self, layout: Layout, num_steps: int) -> None:
        self.num_steps = num_steps
        self.position = np.zeros(layout.num_envs, np.int64)
        self._frames: Arrays = {
            leaf.key: leaf.zeros(layout.num_envs, 2 * num_steps) for leaf in layout.per_frame
        }
        self._after: Arrays = {leaf.key: leaf.zeros(layout.num_envs) for leaf in layout.carried}
        self._final: dict[tuple[int, int], Arrays] = {}
        # What followed a frame whose successor found no room, by the place that it would have had.
        self._cut_off: dict[tuple[int, int], Arrays] = {}

    def drop(self) -> int:
        """Forget all frames; how many they were."""
        dropped = int(self.position.sum())
        self.position.fill(0)
        self._final.clear()
        self._cut_off.clear()
        return dropped

    def write(
        self, real: np.ndarray, values: Arrays, envs: EnvBatch, ended: Sequence[int]
    ) -> list[int]:
        """Append a frame to the rows in ``real``; the rows that had no room for it."""
        room = self.position < 2 * self.num_steps
        overflow = [int(row) for row in np.flatnonzero(real & ~room)]
        for row in overflow:
            after_row = {key: after[row].copy() for key, after in self._after.items()}
            self._cut_off.setdefault((row, 2 * self.num_steps), after_row)
        rows = np.flatnonzero(real & room)
        columns = self.position[rows]
        for key, frames in self._frames.items():
            frames[rows, columns] = values[key][rows]
        for key, after in self._after.items():
            after[rows] = envs.obs[key][rows]
        for row in ended:
            if room[row]:
                self._final[row, int(self.position[row])] = {
                    key: array[row].copy()[None] for key, array in envs.final.items()
                }
        self.position[rows] += 1
        return overflow

    def emit(self, slab: Slab) -> None:
        """Move the first T frames of each row to ``slab``."""
        steps = self.num_steps
        ahead = self.position > steps
        for key, tail in slab.tail.items():
            tail[:] = self._after[key]
            tail[ahead] = self._frames[key][ahead, steps]
            for (row, column), after in self._cut_off.items():
                if column == steps:
                    tail[row] = after[key]
        self._cut_off = {
            (row, column - steps): after
            for (row, column), after in self._cut_off.items()
            if column > steps
        }
        for key, frames in self._frames.items():
            slab.frames[key][:] = frames[:, :steps]
            frames[:, :steps] = frames[:, steps:]
        kept: dict[tuple[int, int], Arrays] = {}
        for (row, column), final in sorted(self._final.items()):
            if column < steps:
                slab.add_final(row, column, final, source_row=0)
            else:
                kept[row, column - steps] = final
        self._final = kept
        self.position -= steps


def _bounds(envs: EnvBatch) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    if len(envs.action_leaves) == 1 and isinstance(envs.action_space, Box):
        return {envs.action_leaves[0].key: (envs.action_space.low, envs.action_space.high)}
    raise ArgumentError(f"clip_actions needs a Box action space, not {envs.action_space}")


def _refuse_cuts(options: StepOptions) -> None:
    wanted = "max_frames_per_traj" if options.max_frames_per_traj else "reset_at_each_iter"
    if options.max_frames_per_traj or options.reset_at_each_iter:
        raise ArgumentError(
            f"{wanted} can't work with this native vector env: its rows can't be reset one by one "
            "(it has no reset mask). Pass a maker of single envs and envs_per_worker instead"
        )
