"""Steps envs with a policy and writes every frame in place. All collectors use it.

:class:`Engine` takes requests, resets the envs and swaps weights between rollouts. The steps
themselves are made by one of two loops: :mod:`.aligned_loop` where every row makes one transition
in each step, :mod:`.ragged_loop` for vector envs with filler steps.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import NUM_TASKS, TASK, StepCounter, Task
from distcollect.engine.aligned_loop import AlignedLoop
from distcollect.engine.env_recovery import EnvRecovery
from distcollect.engine.interrupts import Interrupts, Stopped
from distcollect.engine.plan import StepOptions
from distcollect.engine.ragged_loop import RaggedLoop
from distcollect.engine.rollout_loop import RolloutLoop, Trajectories, action_bounds
from distcollect.envs.base import EnvBatch, Faulted
from distcollect.errors import ArgumentError, EnvError, PolicyError
from distcollect.policy.base import Policy
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.random import RandomPolicy
from distcollect.rollout.layout import Layout
from distcollect.rollout.slab import Slab
from distcollect.telemetry.step_timer import StepTimer

log = logging.getLogger(__name__)

# Why the frames of a rollout are lost, by what ended it; any other error is an env's.
_CAUSES: dict[type[BaseException], str] = {
    Stopped: "shut_down",
    KeyboardInterrupt: "interrupted",
    PolicyError: "policy_failed",
}


class Engine:
    """Collects rollouts ``[n, T]`` from n envs and one policy.

    It belongs to one thread. Other threads may call :meth:`stop`, :meth:`preempt`,
    :meth:`run_between_steps` and :meth:`call_envs`, and commit weights; all of these take effect
    between two steps.

    Attributes:
        envs: the envs.
        options: how they are stepped.
        weights: the policy's weights.
        counter: counts the frames.
        step_timer: measures the time that steps take, and records the episodes.
        layout: leaves of the frames.
    """

    def __init__(
        self,
        envs: EnvBatch,
        policy: Policy,
        weights: LiveWeights,
        *,
        traj_ids: Iterator[int],
        options: StepOptions | None = None,
        counter: StepCounter | None = None,
        max_env_faults: int = 0,
        step_timer: StepTimer | None = None,
    ) -> None:
        """Reset the envs and call the policy once, to learn which leaves it writes.

        Args:
            envs: the n envs.
            policy: chooses their actions; it reads from ``envs.obs``.
            weights: the policy's weights.
            traj_ids: the ids of new trajectories.
            options: how to step.
            counter: counts the frames; None: a new one.
            max_env_faults: how many times in a row an env that raises is replaced.
            step_timer: measures the time that steps take; None: a new one.

        Raises:
            ArgumentError: an option that these envs do not support.
            EnvError: an env raised.
            PolicyError: the policy raised, or its output does not fit the action space.
        """
        self.options = options or StepOptions()
        _check_options(self.options, envs)
        self.envs = envs
        self.weights = weights
        self.counter = counter or StepCounter()
        self.step_timer = step_timer or StepTimer(envs.num_envs)
        self._policy = policy
        self._random_policy = RandomPolicy(envs.action_space, envs.num_envs, policy.state)
        self._env_recovery = EnvRecovery(envs, self.counter, max_env_faults)
        self._interrupts = Interrupts()
        self._seeds: Sequence[int] | None = None  # of the next reset
        self._reset_due = False
        self._warned_of_rewards = False
        self._num_kept = 0  # frames in the rollouts that are complete
        self._reset_envs_first()
        self._try_policy()
        self.layout = _layout(envs, policy)
        self._trajectories = Trajectories(envs.num_envs, traj_ids, policy.state)
        loop_type = AlignedLoop if envs.supports_partial_reset else RaggedLoop
        self._loop: RolloutLoop = loop_type(
            envs=envs,
            weights=weights,
            policy_state=policy.state,
            layout=self.layout,
            options=self.options,
            counter=self.counter,
            step_timer=self.step_timer,
            recovery=self._env_recovery,
            trajectories=self._trajectories,
            interrupts=self._interrupts,
        )

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        """Start over with these seeds at the next rollout.

        Args:
            env_seeds: one for each env, and for the random actions in it.
            policy_seeds: one for each env, for what the policy draws in it.
        """
        self._seeds = list(env_seeds)
        self._env_recovery.seed(self._seeds)
        self._random_policy.seed(self._seeds)
        always_random = isinstance(self._policy, RandomPolicy)
        self._policy.seed(env_seeds if always_random else policy_seeds)
        self._reset_due = True

    def use_traj_ids(self, traj_ids: Iterator[int]) -> None:
        """Take trajectory ids from ``traj_ids`` from now on; to be called between two rollouts.

        The trajectories under way get a new id, too.
        """
        self._trajectories.use_ids(traj_ids)

    def stop(self) -> None:
        """Make the running or next :meth:`collect` raise :class:`Stopped` between two steps."""
        self._interrupts.stop()
        self._env_recovery.stop()

    def preempt(self, number: int | None = None) -> None:
        """Make a rollout end between two steps, after at least one step.

        Args:
            number: which one, as :meth:`collect` is told; also one that is still to begin. If it is
                complete, nothing happens. None: the running one; if none is, nothing happens.
        """
        self._interrupts.preempt(number)

    def run_between_steps(self, job: Callable[[], None]) -> None:
        """Run ``job`` between two steps of the running :meth:`collect`, or before the next one.

        Without a :meth:`collect`, :meth:`run_jobs` runs it. It must not raise.
        """
        self._interrupts.add_job(job)

    def run_jobs(self) -> None:
        """Run what :meth:`run_between_steps` was given; on the thread that collects."""
        self._interrupts.run_jobs()

    def collect(
        self,
        slab: Slab,
        *,
        random: bool = False,
        fresh: bool = False,
        number: int | None = None,
        version: int | None = None,
    ) -> None:
        """Fill ``slab`` with the next rollout; if it is preempted, the rest is padding.

        Args:
            slab: memory of this engine's layout.
            random: draw actions from the action space; the extras are zero then.
            fresh: leave out frames from before this call, which native vector envs may have left.
            number: of this rollout, higher than all before; None: one more than the last.
            version: begin with weights no newer than this version; None: with the newest.

        Raises:
            Stopped: see :meth:`stop`.
            EnvError: an env raised too often in a row, or cannot be replaced.
            PolicyError: the policy raised.
        """
        cells = self.counter.cells
        # If not, an exception broke off the last rollout in the middle of what is done after it.
        self.settle("interrupted")
        self._interrupts.rollout_begins(number)
        self._loop.begun_at = self.counter.stepped
        cells[NUM_TASKS] += 1
        cells[TASK] = Task.COLLECT
        self.step_timer.begin()
        try:
            self._loop.swap_weights(version)
            self._collect(slab, random=random, fresh=fresh)
            self._num_kept += slab.num_frames
        except BaseException as error:
            self.settle(_CAUSES.get(type(error), "env_failed"), is_broken=True)
            raise
        finally:
            self._interrupts.rollout_ended()
            cells[TASK] = Task.IDLE
            self.step_timer.end()

    def settle(self, cause: str, *, num_kept: int | None = None, is_broken: bool = False) -> None:
        """Count the frames that no rollout contains as lost, if there are any.

        It may be called at any time between two rollouts, and again if an exception interrupts it.

        Args:
            cause: why they are lost.
            num_kept: the frames in all rollouts that the caller has; None: in all that are
                complete.
            is_broken: the last rollout is not complete: frames that wait for the next one are lost
                too.
        """
        if num_kept is not None:
            self._num_kept = num_kept
        counter = self.counter
        missing = counter.stepped - self._num_kept - sum(counter.lost.values())
        if not is_broken and missing == int(self._loop.surplus.sum()):
            return
        # What follows must be new trajectories.
        self._reset_due = True
        self._loop.abandon()
        counter.lose(cause, counter.stepped - self._num_kept - sum(counter.lost.values()))

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        """Call :meth:`EnvBatch.call` as :meth:`run_between_steps` runs a job.

        A call that takes longer than ``limit_s`` is taken to hang, and the process is ended.
        """
        answer: Future[list[Any]] = Future()

        def call() -> None:
            try:
                with self.counter.doing(Task.CALL, limit_s):
                    result = self.envs.call(name, args, kwargs)
                    _check_can_be_pickled(result, name)
                answer.set_result(result)
            except Exception as error:  # noqa: BLE001 - raised where the future is waited for
                answer.set_exception(error)

        self.run_between_steps(call)
        return answer

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()

    def _reset_envs_first(self) -> None:
        try:
            self.envs.reset()
        except Faulted as faulted:
            raise faulted.faults[0].error from faulted.__cause__

    def _try_policy(self) -> None:
        first = {key: array.copy() for key, array in self.envs.obs.items()}
        self._policy.try_out()
        # It may have changed its input in place.
        for key, array in self.envs.obs.items():
            array[:] = first[key]

    def _collect(self, slab: Slab, *, random: bool, fresh: bool) -> None:
        if self._reset_due or self.options.reset_at_each_iter:
            self._reset()
        slab.clear()
        policy = self._random_policy if random else self._policy
        if random:
            for array in slab.extras.values():
                array.fill(0)
        context = policy.exploring()
        with contextlib.ExitStack() as again:
            # Left twice, as an exception may break off the first time: the thread may be the
            # user's, whose gradients must not stay disabled.
            again.callback(context.__exit__, None, None, None)
            with context:
                self._loop.fill(slab, policy, fresh=fresh)
        if not self._warned_of_rewards and np.isinf(slab.reward).any():
            self._warned_of_rewards = True
            log.warning(
                "an env returned a reward that is infinite, or too large for float32, as which "
                "batches hold rewards: scale the rewards in a wrapper"
            )
        self.step_timer.collected(slab)

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
        self._loop.drop_surplus()
        self._trajectories.begin_all()


def _check_can_be_pickled(result: object, name: str) -> None:
    """Raise EnvError unless what a method of the envs returned can be sent."""
    try:
        pickle.dumps(result)
    except Exception as error:
        raise EnvError(
            f"what {name!r} returned can't be pickled ({type(error).__name__}: {error}), so it "
            "can't be sent to the trainer; return numbers, arrays or tensors"
        ) from error


def _layout(envs: EnvBatch, policy: Policy) -> Layout:
    """The leaves of the frames, once the policy was called."""
    carried = envs.leaves if policy.state is None else (*envs.leaves, *policy.state.leaves)
    return Layout(envs.num_envs, carried, envs.action_leaves, policy.extras, envs.outcome_leaves)


def _check_options(options: StepOptions, envs: EnvBatch) -> None:
    """Raise ArgumentError for an option that the envs do not support."""
    needs_resets = options.max_frames_per_traj or options.reset_at_each_iter
    if needs_resets and not envs.supports_partial_reset:
        wanted = "max_frames_per_traj" if options.max_frames_per_traj else "reset_at_each_iter"
        raise ArgumentError(
            f"{wanted} does not work with this native vector env: it cannot reset single rows, as "
            "it takes no reset mask. Pass a maker of single envs and envs_per_worker instead"
        )
    if options.clip_actions:
        action_bounds(envs)
