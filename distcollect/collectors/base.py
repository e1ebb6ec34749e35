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
from distcollect.seeds import Stream, env_seed

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"

_STATE_FORMAT = 1

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
        num_batches = arguments.total_batches(total_frames, frames_per_batch)
        self.total_frames = -1 if num_batches is None else num_batches * frames_per_batch
        self._frames = 0
        self._batches = 0
        self._resumes = 0
        self._seed: tuple[int, bool] | None = None
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
        """Frames delivered so far, with padding, and those of runs that this one goes on from."""
        return self._frames

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
            EnvError: envs raised again and again; PolicyError: the policy raised. Name the worker.
            WorkerLost: fewer workers are left than ``Faults.min_workers``; says why.
            CollectorStateError: after :meth:`shutdown`.
        """
        self._check_open()
        if self._exhausted:
            raise StopIteration
        batch = self._next(timeout_s)
        self._batches += 1
        self._frames += self.frames_per_batch
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise CollectorStateError("the collector was shut down: make a new one")

    @property
    def _exhausted(self) -> bool:
        return self.total_frames != -1 and self._frames >= self.total_frames

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
        ``static_seed`` all get the same. So does what the policy draws for env i with torch's
        functions, always from a stream of its own: trajectories don't depend on the number of
        workers, as far as the policy's rounding doesn't depend on how many envs it sees at once.

        What the policy draws by other means comes from one generator per worker: in compiled or
        scripted code, within ``nn.LSTM``, ``nn.GRU`` and ``nn.RReLU``, with numpy, or in tensors
        whose first dimension is not that of the envs (or a multiple, as for several agents).

        Unseeded collectors pay nothing for it. Seeded ones need more time for whatever the policy
        calls: with 16 CartPole envs and a small network 1.6 times as long for a frame, and less so
        the longer envs and network take.

        Returns:
            A seed that none of the envs uses, for another collector.
        """

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs; plain numbers, to be saved with your weights."""
        return {
            "format": _STATE_FORMAT,
            "frames": self._frames,
            "policy_version": self.policy_version,
            "next_traj_id": self._next_traj_id(),
            "seed": self._seed,
            "resumes": self._resumes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another collector was, of whatever class and number of workers.

        Frames count on towards ``total_frames``, versions count on, and no traj_id comes twice. The
        policy that this collector was made with is taken for the state's ``policy_version``: load
        its weights before you make the collector, or send them afterwards. Trajectories that were
        under way have ended. After ``set_seed`` the envs are seeded anew, so that they don't repeat
        what they did.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            CollectorStateError: this collector has delivered frames already.
            ArgumentError: this is no such state.
            DeadlineError, WorkerError: the workers did not take it.
        """
        self._check_open()
        if self._batches:
            raise CollectorStateError("load_state_dict must come before the first batch")
        if not isinstance(state, Mapping) or state.get("format") != _STATE_FORMAT:
            raise ArgumentError(
                f"this is no state of a collector (format {_STATE_FORMAT}): {str(state)[:100]}"
            )
        if state["policy_version"] < self.policy_version:
            raise ArgumentError(
                f"the state has policy_version {state['policy_version']}, but this collector has "
                f"published version {self.policy_version} already: load the state first"
            )
        self._resume(state["policy_version"], state["next_traj_id"], state["frames"])
        self._frames = state["frames"]
        self._resumes = state["resumes"] + 1
        if state["seed"] is not None:
            seed, static_seed = state["seed"]
            self.set_seed(env_seed(seed, self._resumes, stream=Stream.RESUMED), static_seed)
            self._seed = seed, static_seed

    @abstractmethod
    def _next_traj_id(self) -> int:
        """No traj_id of this collector is as high."""

    @abstractmethod
    def _resume(self, version: int, first_traj_id: int, frames: int) -> None: ...

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
