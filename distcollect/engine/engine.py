"""Steps envs with a policy and writes every frame in place. Used by all collectors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import StepCounter
from distcollect.engine.env_recovery import EnvRecovery, Stopped
from distcollect.engine.ragged_buffer import RaggedBuffer
from distcollect.envs.base import EnvBatch, Faulted, Step
from distcollect.errors import ArgumentError, PolicyError
from distcollect.policy.base import Policy
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.random import RandomPolicy
from distcollect.rollout.layout import FAULTED, POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays, Key
from distcollect.telemetry.step_timer import StepTimer

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
        exact_version: each rollout is of the version that it is asked for with.
    """

    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    clip_actions: bool = False
    swap_within_rollouts: bool = True
    exact_version: bool = False


class Engine:
    """Collects rollouts ``[n, T]`` from n envs and one policy.

    Not thread-safe, but for :meth:`stop`, :meth:`preempt`, :meth:`soon` and the weights, which
    other threads may hand in at any time: all take effect between two steps.

    Attributes:
        envs: what it steps.
        options: how.
        weights: the policy's.
        counts: what it counts frames in.
        step_timer: what it counts its time and episodes in.
        layout: of the frames.
    """

    def __init__(
        self,
        envs: EnvBatch,
        policy: Policy,
        weights: LiveWeights,
        *,
        traj_ids: Iterator[int],
        options: StepOptions | None = None,
        counts: StepCounter | None = None,
        max_env_faults: int = 0,
        step_timer: StepTimer | None = None,
    ) -> None:
        """Reset the envs and call the policy once, which tells what it writes.

        Args:
            envs: n of them.
            policy: bound to ``envs.obs``.
            weights: the policy's.
            traj_ids: where the ids of new trajectories are taken from.
            options: how to step.
            counts: what to count in; None: a new one.
            max_env_faults: how often in a row an env that raises while a rollout is collected is
                made anew.
            step_timer: what to count its time in; None: a new one.

        Raises:
            ArgumentError: an option that these envs can't follow.
            EnvError, PolicyError: see :mod:`.envs` and :mod:`.policy`.
        """
        self.options = options or StepOptions()
        if not envs.supports_partial_reset:
            _refuse_cuts(self.options)
        self.weights = weights
        self.counts = counts or StepCounter()
        self.step_timer = step_timer or StepTimer(envs.num_envs)
        self.envs = envs
        self._policy = policy
        self._random = RandomPolicy(envs.action_space, envs.num_envs, policy.state)
        self._bounds = _bounds(envs) if self.options.clip_actions else {}
        self._env_recovery = EnvRecovery(envs, self.counts, max_env_faults)
        self._stopped = False
        self._collecting = False
        self._ending = False  # the rollout under way
        self._jobs: deque[Callable[[], None]] = deque()
        self._interrupt = False  # there is one of these to look at
        self._lock = threading.Lock()  # of all these
        self._seeds: Sequence[int] | None = None
        self._new_traj_ids = traj_ids
        self._traj_ids = np.zeros(envs.num_envs, np.int64)
        self._lengths = np.zeros(envs.num_envs, np.int64)
        self._state = policy.state
        of_state = self._state.arrays if self._state is not None else {}
        # What a frame has at its start and its end: before the next frame, and after the last one
        # of an episode.
        self._now: Arrays = {**envs.obs, **of_state}
        self._final: Arrays = {**envs.final, **of_state}
        try:
            envs.reset()
        except Faulted as faulted:
            raise faulted.faults[0].error from faulted.__cause__
        first = {key: array.copy() for key, array in envs.obs.items()}
        policy.try_out()
        # It may have changed its input in place.
        for key, array in envs.obs.items():
            array[:] = first[key]
        carried = envs.leaves if self._state is None else (*envs.leaves, *self._state.leaves)
        self.layout = Layout(
            envs.num_envs, carried, envs.action_leaves, policy.extras, envs.outcome_leaves
        )
        self._ragged: RaggedBuffer | None = None
        self._reset_due = False
        self._begun_at = 0  # frames stepped before the rollout under way
        self._begin_trajectories()

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        """Start over at the next rollout.

        Args:
            env_seeds: of each env, and of its random actions.
            policy_seeds: of what the policy draws for each env.
        """
        self._seeds = list(env_seeds)
        self._env_recovery.seed(self._seeds)
        self._random.seed(self._seeds)
        at_random = isinstance(self._policy, RandomPolicy)
        self._policy.seed(env_seeds if at_random else policy_seeds)
        self._reset_due = True

    def number(self, traj_ids: Iterator[int]) -> None:
        """Take the ids of trajectories from here, at once: nothing spans this call."""
        self._new_traj_ids = traj_ids
        for row in range(self.envs.num_envs):
            self._traj_ids[row] = next(traj_ids)

    def stop(self) -> None:
        """Make the running or next :meth:`collect` raise :class:`Stopped` between two steps."""
        with self._lock:
            self._stopped = self._interrupt = True
        self._env_recovery.stop()

    def preempt(self) -> None:
        """Make the running :meth:`collect` end between two steps, when it has made one at least.

        If none is running nothing happens.
        """
        with self._lock:
            self._ending |= self._collecting
            self._interrupt |= self._collecting

    def soon(self, job: Callable[[], None]) -> None:
        """Have ``job`` done between two steps of the running :meth:`collect`, or before the next.

        :meth:`do_jobs` does it where there is none to come. It must not raise.
        """
        with self._lock:
            self._jobs.append(job)
            self._interrupt = True

    def do_jobs(self) -> None:
        """Do what was handed to :meth:`soon`; on the thread that collects."""
        while self._jobs:
            self._jobs.popleft()()

    def collect(
        self,
        slab: Slab,
        *,
        random: bool = False,
        fresh: bool = False,
        brief: bool = False,
        version: int | None = None,
    ) -> None:
        """Fill ``slab`` with the next rollout; where that was preempted, the rest is padding.

        Args:
            slab: of this engine's layout.
            random: draw actions from the action space; the extras are zero then.
            fresh: no frame from before this call, as native vector envs may have some left over.
            brief: it was preempted before it began.
            version: begin with these weights at the newest; None: with the newest there are.

        Raises:
            Stopped: see :meth:`stop`.
            EnvError: an env raised too often in a row, or can't be made anew.
            PolicyError: the policy raised.
        """
        cells = self.counts.cells
        with self._lock:
            self._collecting = True
            self._ending |= brief
            self._interrupt |= brief
        cells[1] = 1
        self.step_timer.begin()
        try:
            self._swap(version)
            self._collect(slab, random=random, fresh=fresh)
        except BaseException as error:
            # The frames so far are in no rollout, so what follows starts new trajectories.
            self._break_off(_CAUSES.get(type(error), "env_failed"))
            raise
        finally:
            cells[1] = 0
            self.step_timer.end()
            with self._lock:
                self._collecting = self._ending = False
                self._interrupt = self._stopped or bool(self._jobs)

    def call_soon(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[list[Any]]:
        """See :meth:`EnvBatch.call`; done as what is handed to :meth:`soon`."""
        answer: Future[list[Any]] = Future()

        def call() -> None:
            try:
                answer.set_result(self.envs.call(name, args, kwargs))
            except Exception as error:  # noqa: BLE001 - it is raised where the future is waited for
                answer.set_exception(error)

        self.soon(call)
        return answer

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()

    def _collect(self, slab: Slab, *, random: bool, fresh: bool) -> None:
        self._begun_at = self.counts.stepped
        if self._reset_due or self.options.reset_at_each_iter:
            self._reset()
        slab.clear()
        policy = self._random if random else self._policy
        if random:
            for array in slab.extras.values():
                array.fill(0)
        with policy.exploring():
            if self.envs.supports_partial_reset:
                self._fill(slab, policy)
            else:
                self._fill_skewed(slab, policy, fresh)
        self.step_timer.collected(slab)

    def _swap(self, up_to: int | None = None) -> None:
        begin = clock_ns()
        self.weights.apply(up_to)
        self.step_timer.swapped(begin, clock_ns(), self.weights.version)

    def _reset(self) -> None:
        begin = clock_ns()
        try:
            self.envs.reset(self._seeds)
        except Faulted as faulted:
            for fault in faulted.faults:
                self._env_recovery.rebuild(fault)
        self.step_timer.was_reset(begin, clock_ns())
        self._seeds = None
        self._reset_due = False
        if self._ragged is not None:
            self.counts.lose("row_skew", self._ragged.drop())
        self._begin_trajectories()

    def _begin_trajectories(self) -> None:
        self._lengths.fill(0)
        for row in range(self.envs.num_envs):
            self._traj_ids[row] = next(self._new_traj_ids)
        self._begin(range(self.envs.num_envs))

    def _begin(self, rows: Sequence[int]) -> None:
        """What the policy remembers of episodes is not for those that begin in ``rows``."""
        if self._state is not None:
            self._state.begin(rows)

    def _break_off(self, cause: str) -> None:
        if self.envs.supports_partial_reset:
            self.counts.lose(cause, self.counts.stepped - self._begun_at)
        elif self._ragged is not None:
            self.counts.lose(cause, self._ragged.drop())
        self._reset_due = True

    def _between_steps(self) -> bool:
        """Do what other threads want; whether the rollout is to end here."""
        if self._stopped:
            raise Stopped
        self.do_jobs()
        with self._lock:
            self._interrupt = self._stopped or self._ending or bool(self._jobs)
        if self._ending and self.counts.stepped > self._begun_at:
            return True
        if self.options.swap_within_rollouts:
            self._swap()
        return False

    def _fill(self, slab: Slab, policy: Policy) -> None:  # noqa: C901, PLR0912, PLR0915 - see below
        """The hot loop: every env makes one transition in each step.

        In one piece, as calls of its own would cost more than what they do.
        """
        envs, weights, lengths = self.envs, self.weights, self._lengths
        longest, swaps = self.options.max_frames_per_traj, self.options.swap_within_rollouts
        # Time first: array[step] is found in half the time of array[:, step].
        starts = [(array.swapaxes(0, 1), self._now[key]) for key, array in slab.root.items()]
        actions = [(leaf.key, slab.action[leaf.key].swapaxes(0, 1)) for leaf in self.layout.action]
        extras = [array.swapaxes(0, 1) for array in slab.extras.values()]
        outcomes = [(slab.outcomes[key].swapaxes(0, 1), now) for key, now in envs.outcomes.items()]
        rewards = slab.reward.swapaxes(0, 1)
        slab.policy_version.fill(weights.version)
        slab.traj_ids[:] = self._traj_ids[:, None]
        cells, stepped, num_envs = self.counts.cells, self.counts.stepped, envs.num_envs
        streaks = self._env_recovery.streaks
        step_timer, due, begin, middle = self.step_timer, self.step_timer.due, 0, 0
        action: Arrays = {}
        cut = None
        for step in range(slab.num_steps):
            if self._interrupt or (weights.pending and swaps):
                if self._between_steps():
                    slab.pad(np.full(num_envs, step), self._now)
                    return
                slab.policy_version[:, step:] = weights.version
            timed = step >= due
            # Before the policy sees it, which may change its input in place.
            for column, now in starts:
                column[step] = now
            if timed:
                begin = clock_ns()
            chosen, written = policy()
            for (key, column), tensor in zip(actions, chosen, strict=True):
                value = tensor.numpy()
                column[step] = value
                action[key] = value if value.dtype == column.dtype else column[step]
            # None are written by random actions.
            for column, tensor in zip(extras, written, strict=False):
                column[step] = tensor.numpy()
            if self._bounds:
                self._clip(action)
            if longest is not None:
                lengths += 1
                cut = lengths >= longest
            if timed:
                middle = clock_ns()
            try:
                out = envs.step(action, cut)
            except Faulted as faulted:
                self._mend(slab, step, policy, faulted)
                stepped = cells[0]
                continue
            if timed:
                step_timer.timed(begin, middle, clock_ns(), step_timer.stride)
                due = step_timer.due = step + step_timer.stride
            stepped += num_envs
            cells[0] = stepped
            rewards[step] = out.reward
            for column, now in outcomes:
                column[step] = now
            if out.ended:
                if streaks:
                    self._env_recovery.finished(out.ended)
                self._end_trajectories(slab, step, out)
        for key, array in slab.tail.items():
            array[:] = self._now[key]

    def _end_trajectories(self, slab: Slab, step: int, out: Step) -> None:
        for row in out.ended:
            slab.terminated[row, step] = out.terminated[row]
            slab.truncated[row, step] = out.truncated[row]
            slab.add_final(row, step, self._final)
            traj_id = next(self._new_traj_ids)
            self._traj_ids[row] = traj_id
            slab.traj_ids[row, step + 1 :] = traj_id
            self._lengths[row] = 0
        self._begin(out.ended)

    def _mend(self, slab: Slab, step: int, policy: Policy, faulted: Faulted) -> None:
        """Make the envs anew that raised in a step, and have it done by all rows after all."""
        out, longest = faulted.result, self.options.max_frames_per_traj
        rows: Sequence[int] = range(self.envs.num_envs)
        while True:
            self.counts.add(len(rows) - len(faulted.not_stepped))
            slab.faulted[faulted.cut_short, step] = True
            self._env_recovery.finished(
                {*rows}.intersection(out.ended).difference(faulted.cut_short)
            )
            for fault in faulted.faults:
                self._env_recovery.rebuild(fault)
            rows = faulted.not_stepped
            if not rows:
                break
            self._begin_anew(slab, step, rows)
            action = self._ask_again(slab, step, policy, rows)
            cut = None if longest is None else self._lengths >= longest
            try:
                self.envs.step(action, cut, rows)
            except Faulted as another:
                faulted = another
            else:
                self.counts.add(len(rows))
                self._env_recovery.finished({*rows}.intersection(out.ended))
                break
        slab.reward[:, step] = out.reward
        for key, column in slab.outcomes.items():
            column[:, step] = self.envs.outcomes[key]
        self._end_trajectories(slab, step, out)

    def _begin_anew(self, slab: Slab, step: int, rows: Sequence[int]) -> None:
        """End the trajectories of ``rows`` before this step, and begin others with it."""
        seen = {key: column[:, step] for key, column in slab.root.items()}
        for row in rows:
            # Else it ended by itself, or all of it was delivered before.
            if step and slab.traj_ids[row, step - 1] == self._traj_ids[row]:
                slab.truncated[row, step - 1] = True
                slab.faulted[row, step - 1] = True
                slab.add_final(row, step - 1, seen)
            traj_id = next(self._new_traj_ids)
            self._traj_ids[row] = traj_id
            slab.traj_ids[row, step:] = traj_id
            self._lengths[row] = 1
        self._begin(rows)

    def _ask_again(self, slab: Slab, step: int, policy: Policy, rows: Sequence[int]) -> Arrays:
        """Write the frames' starts of ``rows`` once more; the actions of all rows."""
        obs = self.envs.obs
        for key, column in slab.root.items():
            column[rows, step] = self._now[key][rows]
        kept = {key: array.copy() for key, array in obs.items()}
        chosen, written = policy.for_rows(rows)
        # It may have changed its input in place, and the other rows' is still to be recorded.
        for key, array in obs.items():
            array[:] = kept[key]
        for leaf, tensor in zip(self.layout.action, chosen, strict=True):
            slab.action[leaf.key][rows, step] = tensor.numpy()[rows]
        for leaf, tensor in zip(self.layout.extras, written, strict=False):
            slab.extras[leaf.key][rows, step] = tensor.numpy()[rows]
        action = {leaf.key: slab.action[leaf.key][:, step] for leaf in self.layout.action}
        self._clip(action)
        return action

    def _clip(self, action: Arrays) -> None:
        for key, (low, high) in self._bounds.items():
            action[key] = np.clip(action[key], low, high)

    def _fill_skewed(self, slab: Slab, policy: Policy, fresh: bool) -> None:
        """As :meth:`_fill`, for envs with filler steps, which make rows drift apart."""
        envs, weights = self.envs, self.weights
        ragged = self._ragged
        if ragged is not None and (fresh or ragged.num_steps != slab.num_steps):
            # A trajectory can't span the gap that the surplus leaves.
            for gap in np.flatnonzero(ragged.position):
                self._traj_ids[gap] = next(self._new_traj_ids)
            self.counts.lose("row_skew", ragged.drop())
        if ragged is None or ragged.num_steps != slab.num_steps:
            ragged = self._ragged = RaggedBuffer(self.layout, slab.num_steps)
        swaps = self.options.swap_within_rollouts
        while ragged.position.min() < slab.num_steps:
            if (self._interrupt or (weights.pending and swaps)) and self._between_steps():
                break
            before = {key: array.copy() for key, array in self._now.items()}
            begin = clock_ns()
            chosen, written = policy()
            action = {
                leaf.key: tensor.numpy()
                for leaf, tensor in zip(self.layout.action, chosen, strict=True)
            }
            given = dict(action)
            self._clip(given)
            middle = clock_ns()
            try:
                out = envs.step(given)
            except Faulted as faulted:
                self._mend_skewed(ragged, before, faulted)
                continue
            self.step_timer.timed(begin, middle, clock_ns(), 1)
            if out.ended and self._env_recovery.streaks:
                self._env_recovery.finished(out.ended)
            real = np.ones(envs.num_envs, bool) if out.real is None else out.real
            self.counts.add(int(real.sum()))
            values: Arrays = {**before, **action, **envs.outcomes}
            for index, leaf in enumerate(self.layout.extras):
                random = not written
                values[leaf.key] = leaf.zeros(envs.num_envs) if random else written[index].numpy()
            values["reward",] = out.reward
            values["terminated",] = out.terminated
            values["truncated",] = out.truncated
            values[TRAJ_IDS] = self._traj_ids
            values[POLICY_VERSION] = np.full(envs.num_envs, weights.version)
            values[FAULTED] = np.zeros(envs.num_envs, bool)
            overflow = ragged.write(real, values, self._now, self._final, out.ended)
            self.counts.lose("row_skew", len(overflow))
            # A frame that found no room leaves a gap, which no trajectory may span.
            for ended in {*out.ended, *overflow}:
                self._traj_ids[ended] = next(self._new_traj_ids)
            # A filler step is none of the episode that follows it.
            self._begin([*out.ended, *np.flatnonzero(~real)])
        ragged.emit(slab)

    def _mend_skewed(self, ragged: RaggedBuffer, seen: Arrays, faulted: Faulted) -> None:
        """Make a vector env anew that raised: no row made its transition."""
        for fault in faulted.faults:
            self._env_recovery.rebuild(fault)
        for row in faulted.not_stepped:
            ragged.cut_short(row, self._traj_ids[row], seen)
            self._traj_ids[row] = next(self._new_traj_ids)
        self._begin(faulted.not_stepped)


def _bounds(envs: EnvBatch) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
    if len(envs.action_leaves) == 1 and isinstance(envs.action_space, Box):
        return {envs.action_leaves[0].key: (envs.action_space.low, envs.action_space.high)}
    raise ArgumentError(
        f"clip_actions needs a Box action space, not {envs.action_space}: leave it out"
    )


def _refuse_cuts(options: StepOptions) -> None:
    wanted = "max_frames_per_traj" if options.max_frames_per_traj else "reset_at_each_iter"
    if options.max_frames_per_traj or options.reset_at_each_iter:
        raise ArgumentError(
            f"{wanted} can't work with this native vector env: its rows can't be reset one by one "
            "(it has no reset mask). Pass a maker of single envs and envs_per_worker instead"
        )
