"""What the engines for arrays and for TensorDicts have in common: requests from other threads."""

from __future__ import annotations

import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import NUM_TASKS, TASK, StepCounter, Task
from distcollect.common.waiting import answer
from distcollect.engine.env_recovery import EnvRecovery, taken_faults
from distcollect.engine.interrupts import Interrupts, Stopped
from distcollect.engine.plan import WorkerPlan
from distcollect.engine.trajectories import Trajectories
from distcollect.envs.base import Envs
from distcollect.errors import EnvError, PolicyError, users_errors
from distcollect.policy.base import Woken
from distcollect.policy.calling import moved
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import published
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Layout
from distcollect.rollout.slabs import AnySlab
from distcollect.telemetry.step_timer import StepTimer

V = TypeVar("V")
W = TypeVar("W")

# Why the frames of a rollout are lost, by what ended it: the first that it is.
_CAUSES: dict[type[BaseException], str] = {
    Stopped: "shut_down",
    Woken: "shut_down",
    PolicyError: "policy_failed",
    Exception: "env_failed",
    BaseException: "interrupted",  # Ctrl-C, or an exit
}


class EngineBase(ABC):
    """Collects rollouts ``[n, T]`` from n envs and one policy.

    It belongs to one thread. Other threads may call :meth:`stop`, :meth:`preempt` and
    :meth:`call_envs`, and commit weights; all of these take effect between two steps.

    Attributes:
        envs: the envs.
        options: how they are stepped.
        weights: the policy's weights.
        counter: counts the frames.
        step_timer: measures the time that steps take, and records the episodes.
        recovery: replaces envs that raise.
        interrupts: what other threads ask for.
        layout: leaves of the frames.
        frames_before: frames of all workers that were asked for before the running rollout.
        next_seed: a seed for other envs, once this engine was seeded; None: derive one.
    """

    layout: Layout
    next_seed: int | None = None

    def __init__(
        self, envs: Envs, plan: WorkerPlan, traj_ids: Iterator[int], counter: StepCounter | None
    ) -> None:
        """Take over the envs, once the policy of the plan was called with what they need."""
        self.options = plan
        self.envs: Any = envs
        if plan.device is not None:
            for model in plan.models.values():
                moved(model, plan.device)
        self.weights = LiveWeights(
            published(plan.policy, plan.models), plan.exclude, keeps_each=plan.exact_version
        )
        self.counter = counter or StepCounter()
        self.step_timer = StepTimer(envs.num_envs, plan.metrics, traces=plan.traces)
        self.recovery = EnvRecovery(envs, self.counter, plan.max_env_faults)
        self.interrupts = Interrupts()
        self._trajectories = Trajectories(envs.num_envs, traj_ids)
        if plan.link is not None:
            self.weights = plan.link.weights
            self.interrupts.on_request = plan.link.ring
        self.frames_before = 0
        self._reset_due = False
        self._num_kept = 0  # frames in the rollouts that are complete

    @abstractmethod
    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        """Start over with these seeds at the next rollout.

        Args:
            env_seeds: one for each env. Nothing else draws by these: a space or generator with the
                same seed gives the very numbers that the env draws.
            policy_seeds: one for each env, for what the policy draws in it, and random actions.
        """

    def reset(self) -> None:
        """Reset all envs at the beginning of the next rollout."""
        self._reset_due = True

    def use_traj_ids(self, traj_ids: Iterator[int]) -> None:
        """Take trajectory ids from ``traj_ids`` from now on; to be called between two rollouts.

        The trajectories under way get a new id, too.
        """
        self._trajectories.use_ids(traj_ids)

    def stop(self) -> None:
        """Make the running or next :meth:`collect` raise :class:`Stopped` between two steps."""
        self.interrupts.stop()
        self.recovery.stop()

    def preempt(self, number: int | None = None) -> None:
        """Make a rollout end between two steps, after at least one step.

        Args:
            number: which one, as :meth:`collect` is told; also one that is still to begin. If it is
                complete, nothing happens. None: the running one; if none is, nothing happens.
        """
        self.interrupts.preempt(number)

    def collect(
        self,
        slab: AnySlab,
        *,
        random: bool = False,
        fresh: bool = False,
        number: int | None = None,
        version: int | None = None,
        frames: int = 0,
    ) -> None:
        """Fill ``slab`` with the next rollout; if it is preempted, the rest is padding.

        Args:
            slab: memory of this engine's layout.
            random: draw actions from the action space; the extras are zero then.
            fresh: leave out frames from before this call, which native vector envs may have left.
            number: of this rollout, higher than all before; None: one more than the last.
            version: begin with weights no newer than this version; None: with the newest.
            frames: frames of all workers that were asked for before it.

        Raises:
            Stopped: see :meth:`stop`.
            EnvError: an env raised too often in a row, or cannot be replaced.
            PolicyError: the policy raised.
        """
        cells = self.counter.cells
        # If not, an exception broke off the last rollout in the middle of what is done after it.
        self.settle("interrupted")
        self.interrupts.rollout_begins(number)
        self.frames_before = frames
        cells[NUM_TASKS] += 1
        cells[TASK] = Task.COLLECT
        self.step_timer.begin()
        try:
            self.swap_weights(version)
            self._collect(slab, random=random, fresh=fresh)
            self._num_kept += slab.num_frames
        except BaseException as error:
            cause = next(why for kind, why in _CAUSES.items() if isinstance(error, kind))
            self.settle(cause, is_broken=True)
            raise
        finally:
            self.interrupts.rollout_ended()
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
        if not is_broken and self._num_uncounted == self.num_waiting:
            return
        # What follows must be new trajectories.
        self._reset_due = True
        self._abandon()
        self.counter.lose(cause, self._num_uncounted)

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        """Call :meth:`Envs.call` as a job of the interrupts.

        A call that takes longer than ``limit_s`` is taken to hang, and the process is ended.
        """

        def call() -> list[Any]:
            with self.counter.doing(Task.CALL, limit_s):
                return _copied(self.envs.call(name, args, kwargs), name)

        future: Future[list[Any]] = Future()
        self.interrupts.add_job(partial(answer, future, call))
        return future

    def header(
        self, slab: AnySlab, worker_id: int, incarnation: int, sequence: int, num_bytes: int = 0
    ) -> Header:
        """Describe the rollout that was just collected into ``slab``; see :class:`Header`."""
        versions, counter = slab.policy_version, self.counter
        return Header(
            worker_id,
            incarnation,
            sequence,
            slab.num_frames,
            slab.num_steps,
            num_bytes,
            policy_version=(int(versions.min()), int(versions.max())),
            stepped=counter.stepped,
            lost=tuple(counter.lost.items()),
            env_faults=counter.env_faults,
            faults=taken_faults(counter, worker_id, incarnation),
            work=self.step_timer.work(),
            spans=self.step_timer.spans(),
            wire_form=slab.wire_form,
        )

    def close(self) -> None:
        """Close the envs."""
        self.envs.close()

    def swap_weights(self, up_to: int | None = None) -> None:
        """Compute with the newest weights from now on.

        Args:
            up_to: the newest version that may be used; None: any.
        """
        begin = clock_ns()
        self.weights.apply(up_to)
        self.step_timer.swapped(begin, clock_ns(), self.weights.version)

    def between_steps(self) -> bool:
        """Do what other threads ask for; return True if the rollout ends here.

        Raises:
            Stopped: another thread stopped the collection.
        """
        if self.interrupts.handle() and self._num_uncounted > 0:
            return True
        if self.options.swap_within_rollouts:
            self.swap_weights()
        return False

    @property
    def _num_uncounted(self) -> int:
        """Number of frames that were stepped, are in no complete rollout, and not lost."""
        return self.counter.stepped - self._num_kept - sum(self.counter.lost.values())

    def make_steps(
        self,
        slab: AnySlab,
        num_steps: int,
        *,
        choose: Callable[[int], V],
        step_envs: Callable[[V], W],
        record: Callable[[int, W], object],
        recover: Callable[[int, Any], int | None],
    ) -> int:
        """Make the steps of a rollout, or of a part of one.

        Args:
            slab: where ``policy_version`` is written.
            num_steps: how many.
            choose: writes the start of a step with this index, and returns its actions.
            step_envs: steps the envs with these actions.
            record: writes what that returned, and counts its frames.
            recover: replaces the envs that raised an EnvError in a step; returns which step is the
                next one, None: this part ends here.

        Returns:
            How many steps were made: fewer than ``num_steps`` if the rollout, or this part, ends.
        """
        interrupts, weights = self.interrupts, self.weights
        timer, swaps = self.step_timer, self.options.swap_within_rollouts
        slab.policy_version.fill(weights.version)
        step, due, begin, middle = 0, timer.due, 0, 0
        while step < num_steps:
            if interrupts.pending or (weights.pending and swaps):
                if self.between_steps():
                    break
                slab.policy_version[:, step:] = weights.version
            timed = step >= due
            if timed:
                begin = clock_ns()
            try:
                action = choose(step)
                if timed:
                    middle = clock_ns()
                result = step_envs(action)
            except Woken:
                interrupts.pending = True
                continue
            except EnvError as error:
                following = recover(step, error)
                if following is None:
                    break
                step = following
                continue
            if timed:
                timer.timed(begin, middle, clock_ns(), timer.stride)
                due = timer.due = step + timer.stride
            record(step, result)
            step += 1
        return step

    def choose_elsewhere(self, slab: AnySlab, choose: Callable[[int], V], step: int) -> V:
        """Choose by way of another process, whose answer says which version it has used."""
        before = self.weights.version
        action = choose(step)
        if before != self.weights.version:
            slab.policy_version[:, step:] = self.weights.version
        return action

    @abstractmethod
    def _collect(self, slab: Any, *, random: bool, fresh: bool) -> None:
        """Fill the slab; see :meth:`collect`."""

    @abstractmethod
    def _abandon(self) -> None:
        """Drop the frames of a rollout that failed, and those that wait for the next one."""

    @property
    def num_waiting(self) -> int:
        """Number of frames that were stepped and wait for the next rollout."""
        return 0


def seed_global_generators(seed: int) -> None:
    """Seed the generators of this process that envs and policies may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - some envs still use it
    random.seed(seed)


def _copied(result: list[Any], name: str) -> list[Any]:
    """Copy what a method of the envs returned: they may change it while it is being sent.

    Raises:
        EnvError: it can't be sent.
    """
    try:
        copy: list[Any] = pickle.loads(pickle.dumps(result))
    except users_errors() as error:
        raise EnvError(
            f"what {name!r} returned can't be pickled ({type(error).__name__}: {error}), so it "
            "can't be sent to the trainer; return numbers, arrays or tensors"
        ) from error
    return copy
