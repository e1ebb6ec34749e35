"""What all collectors have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import gymnasium as gym
from tensordict import TensorDict

from distcollect import arguments, recycler
from distcollect.engine import StepOptions
from distcollect.errors import ArgumentError, CollectorStateError
from distcollect.handle import PushHandle
from distcollect.publisher import Weights, WorkerIds

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"

_Self = TypeVar("_Self", bound="DataCollectorBase")


class LagStats(NamedTuple):
    """Lags of a batch's frames: versions sent to their worker that are newer than their own."""

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]]) -> LagStats:
        """From (lag, frames that have it), in any order."""
        lags = [lag for lag, _ in counts]
        mean = sum(lag * num for lag, num in counts) / sum(num for _, num in counts)
        return cls(min(lags), mean, max(lags))


class DataCollectorBase(ABC):
    """What all collectors have in common: an iterable of batches.

    A batch is a TensorDict with exactly ``frames_per_batch`` frames, its last dimension named
    "time":

    - the observation (``"observation"``, or one key for each entry of a Dict space), ``"action"``,
      all else the policy returned, and ``"done"``, ``"terminated"``, ``"truncated"`` (bool,
      ``[..., T, 1]``);
    - under ``"next"`` the observation after the step (at the end of an episode the true final one),
      ``"reward"`` (float32 ``[..., T, 1]``), ``"done"``, ``"terminated"``, ``"truncated"``;
    - under ``"collector"`` ``"traj_ids"``, ``"policy_version"``, ``"worker_id"`` (int64
      ``[..., T]``) and ``"faulted"`` (bool ``[..., T]``: a trajectory ends here as its env raised).

    A batch is yours: it is never rewritten and shares no memory with another.

    Attributes:
        frames_per_batch: frames in each batch.
        total_frames: frames until it ends, a multiple of the above; -1: endless.
    """

    def __init__(self, *, frames_per_batch: int, total_frames: int) -> None:
        """Check the sizes. Raises as :func:`~distcollect.arguments.total_batches` does."""
        arguments.positive("frames_per_batch", frames_per_batch)
        self.frames_per_batch = frames_per_batch
        self._num_batches = arguments.total_batches(total_frames, frames_per_batch)
        self.total_frames = (
            -1 if self._num_batches is None else self._num_batches * frames_per_batch
        )
        self._delivered = 0
        self._closed = False
        self._lag: LagStats | None = None

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the newest published weights; 0: those the policy started with.

        A frame's policy lag is this minus its ``("collector", "policy_version")``.
        """

    @property
    def version_lag(self) -> LagStats | None:
        """The lags of the last batch's frames when it was delivered; None before the first."""
        return self._lag

    @property
    def frames(self) -> int:
        """Frames delivered so far."""
        return self._delivered * self.frames_per_batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are delivered; goes on where it was left."""
        while not self._exhausted:
            yield self.next()

    def next(self, timeout_s: float | None = None) -> TensorDict:
        """Block until the next batch is there.

        Args:
            timeout_s: instead of ``Faults.batch_timeout_s``.

        Raises:
            StopIteration: ``total_frames`` are delivered.
            BatchTimeout: no batch in time; names the workers waited for.
            EnvError, PolicyError: an env or the policy raised; names worker and env.
            WorkerLost: a worker's process ended.
            CollectorStateError: after :meth:`shutdown`.
        """
        self._check_open()
        if self._exhausted:
            raise StopIteration
        batch = self._next(timeout_s)
        self._delivered += 1
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise CollectorStateError("the collector was shut down: make a new one")

    @property
    def _exhausted(self) -> bool:
        return self._num_batches is not None and self._delivered >= self._num_batches

    @abstractmethod
    def _next(self, timeout_s: float | None) -> TensorDict: ...

    @abstractmethod
    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
    ) -> PushHandle | None:
        """Publish new weights; see the classes."""

    def init_updater(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - nothing to do
        """Hand arguments to the weight updater; does nothing where there is none."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and the policies' randomness; the next batch starts with a reset.

        Env i gets a seed drawn from (``seed``, i), however the envs are spread over workers; with
        ``static_seed`` all get the same.

        Returns:
            A seed that none of the envs uses, for another collector.
        """

    def shutdown(self) -> None:
        """End what the collector started and give back all it holds. Again is no error."""
        self._closed = True
        recycler.forget()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def check_random_frames(value: int | None) -> int:
    """``init_random_frames``, 0 for None. Raises ArgumentError if it can't be."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ArgumentError(f"init_random_frames={value!r}: must be a whole number, 0 or more")
    return value or 0


def step_options(
    max_frames_per_traj: int | None, reset_at_each_iter: bool, clip_actions: bool
) -> StepOptions:
    """How to step. Raises as :func:`~distcollect.arguments.positive` does."""
    arguments.positive("max_frames_per_traj", max_frames_per_traj, optional=True)
    return StepOptions(max_frames_per_traj, reset_at_each_iter, clip_actions)
