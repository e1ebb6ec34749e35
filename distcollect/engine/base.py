"""What the engines for arrays and for TensorDicts have in common: requests from other threads."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import NUM_TASKS, TASK, StepCounter, Task
from distcollect.engine.env_recovery import EnvRecovery
from distcollect.engine.interrupts import Interrupts, Stopped
from distcollect.engine.plan import StepOptions
from distcollect.envs.base import Envs
from distcollect.errors import EnvError, PolicyError
from distcollect.policy.live_weights import LiveWeights
from distcollect.rollout.slabs import AnySlab
from distcollect.rollout.tree_layout import AnyLayout
from distcollect.telemetry.step_timer import StepTimer

# Why the frames of a rollout are lost, by what ended it; any other error is an env's.
_CAUSES: dict[type[BaseException], str] = {
    Stopped: "shut_down",
    KeyboardInterrupt: "interrupted",
    PolicyError: "policy_failed",
}


class EngineBase(ABC):
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
        next_seed: a seed for other envs, once this engine was seeded; None: derive one.
    """

    envs: Envs
    layout: AnyLayout
    next_seed: int | None = None

    def __init__(
        self,
        envs: Envs,
        weights: LiveWeights,
        *,
        options: StepOptions | None = None,
        counter: StepCounter | None = None,
        max_env_faults: int = 0,
        step_timer: StepTimer | None = None,
    ) -> None:
        """Take over the envs; see the derived classes."""
        self.options = options or StepOptions()
        self.envs = envs
        self.weights = weights
        self.counter = counter or StepCounter()
        self.step_timer = step_timer or StepTimer(envs.num_envs)
        self._env_recovery = EnvRecovery(envs, self.counter, max_env_faults)
        self._interrupts = Interrupts()
        self._reset_due = False

    @abstractmethod
    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        """Start over with these seeds at the next rollout.

        Args:
            env_seeds: one for each env, and for the random actions in it.
            policy_seeds: one for each env, for what the policy draws in it.
        """

    def reset(self) -> None:
        """Reset all envs at the beginning of the next rollout."""
        self._reset_due = True

    @abstractmethod
    def use_traj_ids(self, traj_ids: Iterator[int]) -> None:
        """Take trajectory ids from ``traj_ids`` from now on; to be called between two rollouts.

        The trajectories under way get a new id, too.
        """

    def stop(self) -> None:
        """Make the running or next :meth:`collect` raise :class:`Stopped` between two steps."""
        self._interrupts.stop()
        self._env_recovery.stop()

    def preempt(self) -> None:
        """Make the running :meth:`collect` end between two steps, after at least one step.

        Nothing happens if none is running.
        """
        self._interrupts.preempt()

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
        slab: AnySlab,
        *,
        random: bool = False,
        fresh: bool = False,
        preempted: bool = False,
        version: int | None = None,
    ) -> None:
        """Fill ``slab`` with the next rollout; if it is preempted, the rest is padding.

        Args:
            slab: memory of this engine's layout.
            random: draw actions from the action space; the extras are zero then.
            fresh: leave out frames from before this call, which native vector envs may have left.
            preempted: the rollout was preempted before it began: end after one step.
            version: begin with weights no newer than this version; None: with the newest.

        Raises:
            Stopped: see :meth:`stop`.
            EnvError: an env raised too often in a row, or cannot be replaced.
            PolicyError: the policy raised.
        """
        cells = self.counter.cells
        self._interrupts.rollout_begins(preempted=preempted)
        self._rollout_begins()
        cells[NUM_TASKS] += 1
        cells[TASK] = Task.COLLECT
        self.step_timer.begin()
        try:
            self.swap_weights(version)
            self._collect(slab, random=random, fresh=fresh)
        except BaseException as error:
            # No rollout contains the frames so far, so what follows must be new trajectories.
            self._abandon(_CAUSES.get(type(error), "env_failed"))
            self._reset_due = True
            raise
        finally:
            self._interrupts.rollout_ended()
            cells[TASK] = Task.IDLE
            self.step_timer.end()

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        """Call :meth:`Envs.call` as :meth:`run_between_steps` runs a job.

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

    def swap_weights(self, up_to: int | None = None) -> None:
        """Compute with the newest weights from now on.

        Args:
            up_to: the newest version that may be used; None: any.
        """
        begin = clock_ns()
        self.weights.apply(up_to)
        self.step_timer.swapped(begin, clock_ns(), self.weights.version)

    @abstractmethod
    def _rollout_begins(self) -> None: ...

    @abstractmethod
    def _collect(self, slab: Any, *, random: bool, fresh: bool) -> None:
        """Fill the slab; see :meth:`collect`."""

    @abstractmethod
    def _abandon(self, cause: str) -> None:
        """Count the frames of a rollout that failed as lost for ``cause``."""


def _check_can_be_pickled(result: object, name: str) -> None:
    """Raise EnvError unless what a method of the envs returned can be sent."""
    try:
        pickle.dumps(result)
    except Exception as error:
        raise EnvError(
            f"what {name!r} returned can't be pickled ({type(error).__name__}: {error}), so it "
            "can't be sent to the trainer; return numbers, arrays or tensors"
        ) from error
