"""What all collectors have in common."""

from __future__ import annotations

import copy
import functools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import gymnasium as gym
from tensordict import TensorDict

from distcollect.collectors import validation
from distcollect.collectors.batch_format import BatchFormat, WholeTrajectories
from distcollect.collectors.replay import Background, RateLimited, ReplayBuffer, put
from distcollect.common import checks
from distcollect.common import tensor_cache as recycler
from distcollect.common.seeding import Stream, env_seed
from distcollect.config import Faults, Monitor
from distcollect.engine.engine import StepOptions
from distcollect.errors import ArgumentError, CollectorStateError
from distcollect.results import Evaluation, Stats
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Layout
from distcollect.telemetry.bottleneck import Bottleneck, find_bottleneck
from distcollect.telemetry.monitor import MonitorThread
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.trainer.publisher import Weights, WorkerIds
from distcollect.weights.push_handle import PushHandle

EnvMaker: TypeAlias = "str | Callable[..., gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]]"
InfoKeys: TypeAlias = "Sequence[str] | Mapping[str, gym.Space[Any] | None] | None"

_STATE_FORMAT = 1
# For a thread that has been told to end, and whose workers are gone.
JOIN_TIMEOUT_S = 10.0

_Self = TypeVar("_Self", bound="DataCollectorBase")
_Init = TypeVar("_Init", bound=Callable[..., None])
_Method = TypeVar("_Method", bound=Callable[..., Any])


class LagStats(NamedTuple):
    """Lags of a batch's frames: how many newer versions had been sent to their worker.

    Attributes:
        min: the lowest lag, in versions.
        mean: the mean over the frames.
        max: the highest lag.
    """

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]]) -> LagStats:
        """From (lag, frames that have it), in any order."""
        lags = [lag for lag, _ in counts]
        mean = sum(lag * num for lag, num in counts) / sum(num for _, num in counts)
        return cls(min(lags), mean, max(lags))


def timed(take: _Method) -> _Method:
    """Have the book know when the calling thread takes a batch, by this method of a collector."""

    @functools.wraps(take)
    def wrapper(self: DataCollectorBase, *args: Any, **kwargs: Any) -> Any:
        stats_recorder, watch = self._stats_recorder, self._monitor_thread
        stats_recorder.switch_to("assemble")
        if not watch.has_begun:
            watch.begin(_weakly(self.stats))
        try:
            return take(self, *args, **kwargs)
        except StopIteration:
            stats_recorder.end()
            raise
        finally:
            stats_recorder.switch_to("train")

    return cast("_Method", wrapper)


class DataCollectorBase(ABC):
    """What all collectors have in common: an iterable of batches.

    A batch is a TensorDict with exactly ``frames_per_batch`` frames, its last dimension named
    "time". It holds:

    - the observation (``"observation"``, or one key for each entry of a Dict space), ``"action"``,
      whatever else the policy returned, and ``"done"``, ``"terminated"``, ``"truncated"`` (bool,
      ``[..., T, 1]``, always False);
    - under ``"next"`` the observation after the step (at the end of an episode the true final one),
      ``"reward"`` (float32 ``[..., T, 1]``), ``"done"``, ``"terminated"``, ``"truncated"``;
    - under ``"collector"`` ``"traj_ids"``, ``"policy_version"``, ``"worker_id"`` (int64
      ``[..., T]``) and ``"faulted"`` (bool ``[..., T]``: the trajectory ends here because its env
      raised), and where there can be padding ``"mask"`` (bool ``[..., T]``, False for padding).

    A batch is yours: it is never rewritten and shares no memory with another.

    With a ``replay_buffer`` batches go there instead: iterating yields None for each, or
    :meth:`start` fills it in the background.

    :meth:`stats` says at any time what was done and where the time went, :meth:`bottleneck` what
    the run is bound by. A :class:`~distcollect.Monitor` shows this while the run goes on, and
    writes it to files.

    Attributes:
        frames_per_batch: frames in each batch.
        total_frames: frames after which it ends, a multiple of ``frames_per_batch``; -1: endless.
    """

    _unwatch: Callable[[], object] | None = None  # ends what is told of it

    def __init__(
        self,
        *,
        frames_per_batch: int,
        total_frames: int,
        delivery: BatchFormat,
        replay_buffer: ReplayBuffer | None,
        faults: Faults | None,
        monitor: Monitor | None,
        trace: str | os.PathLike[str] | None,
    ) -> None:
        """Check the sizes.

        Raises:
            ArgumentError, ArgumentTypeError: these sizes can't work.
        """
        checks.positive("frames_per_batch", frames_per_batch)
        self.frames_per_batch = frames_per_batch
        num_batches = validation.total_batches(total_frames, frames_per_batch)
        self.total_frames = -1 if num_batches is None else num_batches * frames_per_batch
        self._frames = 0
        self._resumed_frames = 0
        self._batches = 0
        self._resumes = 0
        self._seed: tuple[int, bool] | None = None
        self._closed = False
        self._lag: LagStats | None = None
        self._faults = faults or Faults()
        self._batch_format = delivery
        self._whole: WholeTrajectories | None = None
        if delivery.trajs_per_batch is not None:
            self._whole = WholeTrajectories(delivery.trajs_per_batch)
        self._replay_buffer = replay_buffer
        self._background: Background | None = None
        self._close_env = True
        self._monitor_thread = MonitorThread(monitor, trace)
        self._stats_recorder = StatsRecorder(trace=self._monitor_thread.trace)
        # For a collector that nobody shuts down.
        self._unwatch = weakref.finalize(self, self._monitor_thread.close, None)

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the newest published weights; 0: those the policy started with.

        A frame's lag is the number of versions that were sent to its worker and are newer than the
        frame's ``("collector", "policy_version")``.
        """

    @property
    def version_lag(self) -> LagStats | None:
        """The lags of the last batch's frames when it was delivered; None before the first."""
        return self._lag

    @property
    def frames(self) -> int:
        """Frames collected so far, padding and those of a run that was resumed included."""
        return self._frames

    @property
    def abandoned_frames(self) -> int:
        """With ``trajs_per_batch``: frames of trajectories that can no longer become whole."""
        return self._whole.abandoned_frames if self._whole is not None else 0

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected; a second loop continues."""
        while True:
            try:
                batch = self.next()
            except StopIteration:
                return
            yield batch

    def next(self, timeout_s: float | None = None) -> TensorDict:
        """Block until the next batch is there.

        Args:
            timeout_s: seconds, instead of ``Faults.batch_timeout_s``; with ``trajs_per_batch`` for
                each of the rollouts that a batch takes.

        Returns:
            The batch; None if it went to the ``replay_buffer``.

        Raises:
            StopIteration: ``total_frames`` are collected.
            BatchTimeout: no batch in time; names the workers waited for.
            EnvError: envs raised again and again; names the worker.
            PolicyError: the policy raised; names the worker.
            WorkerLost: fewer workers are left than ``Faults.min_workers``; says why.
            CollectorStateError: after :meth:`shutdown`, or after :meth:`start`.
        """
        self._check_may_take()
        return self._take(timeout_s)

    @timed
    def _take(self, timeout_s: float | None) -> TensorDict:
        if self._whole is None:
            batch = self._collect(timeout_s)[0]
        else:
            batch = self._whole_trajectories(self._whole, timeout_s)
        return self._handed_on(batch)

    def _handed_on(self, batch: TensorDict) -> TensorDict:
        batch = self._batch_format.processed(batch)
        if self._replay_buffer is None:
            return batch
        put(batch, self._replay_buffer)
        return cast("TensorDict", None)

    def _whole_trajectories(self, whole: WholeTrajectories, timeout_s: float | None) -> TensorDict:
        while not whole.ready:
            try:
                rows, headers = self._collect(timeout_s)
            except StopIteration:
                if (last := whole.take()) is None:
                    raise
                return last
            whole.add(rows, headers)
        batch = whole.take()
        assert batch is not None
        return batch

    def _collect(self, timeout_s: float | None) -> tuple[TensorDict, Sequence[Header]]:
        """A batch as it was collected, in the shape that is wanted; its rollouts' headers."""
        self._check_not_over()
        rows, headers = self._next(self._limit_s(timeout_s))
        self._note_batch()
        return self._batch_format.shaped(rows, self._layout), headers

    def _check_not_over(self) -> None:
        if self.total_frames != -1 and self._frames >= self.total_frames:
            raise StopIteration

    def _note_batch(self) -> None:
        self._batches += 1
        self._frames += self.frames_per_batch

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._faults.batch_timeout_s if timeout_s is None else timeout_s

    def start(self) -> None:
        """Fill the replay buffer in the background, until ``total_frames`` are collected.

        The policy that collects is a copy; :meth:`update_policy_weights_` sends it new weights. Use
        :meth:`async_shutdown` to end. If collection fails, the next call to the collector raises
        the reason, and so does ``sample()`` of a :class:`~distcollect.RateLimited` buffer.

        Raises:
            CollectorStateError: there is no ``replay_buffer``, or it was started already.
        """
        self._check_open()
        if self._replay_buffer is None:
            raise CollectorStateError(
                "start() needs a replay_buffer to fill: pass replay_buffer= to the collector"
            )
        if self._background is not None:
            raise CollectorStateError(
                "the collector was started already: end that by async_shutdown(), or use pause()"
            )
        self._before_start()
        limit = self._replay_buffer if isinstance(self._replay_buffer, RateLimited) else None
        # Not the collector itself, whose workers end when the user drops it.
        take_one = weakref.WeakMethod(self._take_one)

        def collect() -> bool:
            take = take_one()
            return take is not None and take()

        self._background = Background(collect, limit)

    def _before_start(self) -> None:  # noqa: B027 - most have nothing to do
        """Make sure that collecting on another thread is safe."""

    def _take_one(self) -> bool:
        try:
            self._take(None)
        except StopIteration:
            return False
        return True

    @property
    def is_running(self) -> bool:
        """Whether it is collecting in the background, after :meth:`start`."""
        return self._background is not None and self._background.is_alive

    def pause(self, timeout_s: float = 600.0) -> AbstractContextManager[None]:
        """A context within which nothing is added to the replay buffer.

        A batch that is being collected when it is entered is added first.

        Args:
            timeout_s: seconds to wait for that batch.

        Raises:
            CollectorStateError: :meth:`start` was not called.
            DeadlineError: that batch was not finished in time.
        """
        self._check_open()
        if self._background is None:
            raise CollectorStateError("pause() is for a collector that was started by start()")
        return self._background.paused(timeout_s)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started by :meth:`start`.

        Args:
            timeout: seconds to wait for the batch that is being collected, which is then added to
                the buffer; None: it is given up.
            close_env: whether to close the envs. False matters for a collector that steps an env of
                yours in this process: it is left open.

        Raises:
            Whatever made collection fail in the background.
        """
        background = self._background
        if background is not None:
            background.stop()
            if timeout is not None:
                background.join(timeout)
        self._close_env = close_env
        self.shutdown()
        if background is not None:
            background.join(JOIN_TIMEOUT_S)
        self._raise_from_background()

    def _raise_from_background(self) -> None:
        """Raise what ended it, once."""
        if self._background is not None and self._background.error is not None:
            error, self._background.error = self._background.error, None
            raise error

    def _check_open(self) -> None:
        if self._background is not None and self._background.error is not None:
            raise copy.copy(self._background.error) from self._background.error
        if self._closed:
            raise CollectorStateError("the collector was shut down: make a new one")

    def _check_may_take(self) -> None:
        self._check_open()
        if self._background is not None:
            raise CollectorStateError(
                "the collector fills its replay buffer in the background since start(): sample "
                "from that, or end it by async_shutdown()"
            )

    @property
    @abstractmethod
    def _layout(self) -> Layout: ...

    @abstractmethod
    def _next(self, timeout_s: float) -> tuple[TensorDict, Sequence[Header]]:
        """Rows ``[W * n, T]`` of W rollouts, and their headers."""

    @abstractmethod
    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
    ) -> PushHandle | None:
        """Publish new weights as the next ``policy_version``.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict; None: the collector's
                own policy.
            worker_ids: the workers to send them to; None: all.
            wait: return only when it is known which workers have them.

        Returns:
            A handle that says which workers have them; None without workers, or if nothing was
            published.

        Raises:
            WeightsError: they don't fit the policy; nothing was sent.
        """

    def stats(self) -> Stats:
        """What was done so far, and where the time went; also after :meth:`shutdown`.

        Time is counted from the first batch to the last. What a worker does becomes known with its
        next rollout.
        """
        about = Stats(
            collector=type(self).__name__,
            frames=self._frames,
            resumed_frames=self._resumed_frames,
            total_frames=self.total_frames,
            policy_version=self.policy_version,
            ended=self._closed,
        )
        return self._snapshot(about)

    @abstractmethod
    def _snapshot(self, about: Stats) -> Stats:
        """``about``, and what is known beside it."""

    def bottleneck(self) -> Bottleneck:
        """What bounds the run so far, and what would help most; ``str()`` of it is a sentence."""
        return find_bottleneck(self.stats())

    def init_updater(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - nothing to do
        """Pass arguments to the weight updater's ``init``; without an updater nothing happens."""

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and the policies' randomness; the next batch starts with a reset.

        Env i gets a seed derived from (``seed``, i), however the envs are spread over workers. What
        the policy draws for env i with torch's functions comes from a stream derived in the same
        way. So trajectories don't depend on the number of workers, as long as the policy's result
        for one env doesn't depend, by rounding, on how many envs it is called with.

        What the policy draws in other ways comes from one generator per worker, and so depends on
        the number of workers: in compiled or scripted code, within ``nn.LSTM``, ``nn.GRU`` and
        ``nn.RReLU``, with numpy, or in tensors whose first dimension is not that of the envs (or a
        multiple of it, as for several agents).

        Seeding costs time in the policy: with 16 CartPole envs and a small network a frame takes
        1.6 times as long; the larger envs and network, the less. Without a seed it costs nothing.

        Args:
            seed: a whole number, 0 or more.
            static_seed: all envs get the same seed, instead of one each.

        Returns:
            A seed that none of the envs uses, for another collector.

        Raises:
            CollectorStateError: it was shut down.
            DeadlineError, WorkerError: the workers did not accept it.
        """

    def call(
        self,
        method: str,
        *args: Any,
        worker_ids: WorkerIds = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> dict[int, list[Any]]:
        """Call a method of the envs between two of their steps, or read an attribute of theirs.

        A rollout that is being collected goes on afterwards. (A collector that steps envs in this
        process, in the background, finishes it first.) A worker that replaces a lost one has new
        envs, which know nothing of earlier calls.

        Args:
            method: the name of the method or attribute; it is also looked for inside wrappers.
            args: arguments for the method; they are pickled, as is what it returns.
            worker_ids: the workers whose envs are called: an int, a list, a slice; None: all.
            timeout_s: seconds for the whole call; None: ``Faults.batch_timeout_s``.
            kwargs: keyword arguments for the method.

        Returns:
            ``{worker_id: values}``, with one value for each env of the worker, or a single one for
            a native vector env.

        Raises:
            EnvError: an env has no such method, or it raised. Names worker and env.
            ArgumentError, ArgumentTypeError: there is no such worker.
            DeadlineError: some workers didn't answer in time; names them.
            WorkerLost: a worker that was named is lost.
        """
        self._check_open()
        return self._call(method, args, kwargs, worker_ids, self._limit_s(timeout_s))

    @abstractmethod
    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        worker_ids: WorkerIds,
        timeout_s: float,
    ) -> dict[int, list[Any]]: ...

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        worker_ids: WorkerIds = None,
        deterministic: bool = True,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Evaluation:
        """Play whole episodes with the newest weights, in envs made for the purpose.

        ``max_frames_per_traj`` ends these episodes as well. :meth:`call` doesn't reach these envs.
        Collection continues afterwards as if nothing had happened; these frames are not counted.

        Args:
            num_episodes: episodes in all, shared among all envs of these workers.
            worker_ids: the workers that play: an int, a list, a slice; None: all.
            deterministic: take the most likely action, where the policy has a distribution.
            seed: seeds envs and actions, for the same episodes each time; None: a random seed.
            timeout_s: seconds for all episodes; None: ``Faults.batch_timeout_s``.

        Returns:
            Returns, lengths and policy version of each episode.

        Raises:
            EnvError, PolicyError: an env or the policy failed.
            ArgumentError, ArgumentTypeError: there is no such worker, or the collector was given an
                env itself instead of what makes one.
            DeadlineError: not all episodes ended in time.
            WorkerLost: a worker that was named is lost, or all are.
        """
        self._check_open()
        checks.positive("num_episodes", num_episodes)
        limit_s = self._limit_s(timeout_s)
        return self._evaluate(num_episodes, worker_ids, deterministic, seed, limit_s)

    @abstractmethod
    def _evaluate(
        self,
        num_episodes: int,
        worker_ids: WorkerIds,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation: ...

    def state_dict(self) -> dict[str, Any]:
        """StepCounter, versions, seeds and ids for :meth:`load_state_dict`: plain numbers.

        Weights and the envs' state are not included: save the weights with it.
        """
        return {
            "format": _STATE_FORMAT,
            "frames": self._frames,
            "policy_version": self.policy_version,
            "next_traj_id": self._next_traj_id(),
            "seed": self._seed,
            "resumes": self._resumes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another collector was, of whatever class and number of workers.

        Frames and versions are counted on from there, and no traj_id comes twice. The policy that
        this collector was made with is taken to be that of the state's ``policy_version``: load its
        weights before you make the collector, or send them afterwards. Trajectories that were under
        way are over. If there was a seed, the envs are seeded anew, so that they don't repeat what
        they did.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            CollectorStateError: this collector has delivered frames already.
            ArgumentError: ``state`` is not from :meth:`state_dict`, or is behind this collector.
            DeadlineError, WorkerError: the workers did not accept it.
        """
        self._check_open()
        if self._batches:
            raise CollectorStateError(
                f"this collector has delivered {self._frames:,} frames: call load_state_dict() "
                "on a new one, before its first batch"
            )
        if not isinstance(state, Mapping) or state.get("format") != _STATE_FORMAT:
            raise ArgumentError(
                f"this is no state of a collector (format {_STATE_FORMAT}): {str(state)[:100]}; "
                "give what state_dict() returned"
            )
        if state["policy_version"] < self.policy_version:
            raise ArgumentError(
                f"the state has policy_version {state['policy_version']}, but this collector has "
                f"published version {self.policy_version} already: load the state first"
            )
        self._resume(state["policy_version"], state["next_traj_id"], state["frames"])
        self._frames = self._resumed_frames = state["frames"]
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
        """End what the collector started and release what it holds. May be called again."""
        if self._background is not None:
            self._background.stop()
        self._closed = True
        self._stats_recorder.end()
        recycler.forget()

    def _end_watch(self) -> None:
        """Tell of the run for the last time."""
        self._monitor_thread.close(self.stats())

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        if kind is None:
            self._raise_from_background()


def _weakly(method: Callable[[], Stats]) -> Callable[[], Stats | None]:
    """None once the method's object is gone."""
    weak = weakref.WeakMethod(method)

    def call() -> Stats | None:
        found = weak()
        return None if found is None else found()

    return call


def ends_telling_if_it_fails(init: _Init) -> _Init:
    """Have a collector's ``__init__`` that raises close what it opened to tell of the run.

    The error keeps the collector for as long as somebody holds it, as notebooks do the last one;
    Prometheus's port would be taken until then.
    """

    @functools.wraps(init)
    def wrapper(self: DataCollectorBase, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException:
            if self._unwatch is not None:
                self._unwatch()
            raise

    return cast("_Init", wrapper)


def check_random_frames(value: int | None) -> int:
    """``init_random_frames``, 0 for None. Raises ArgumentError if it can't be."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ArgumentError(f"init_random_frames={value!r}: must be a whole number, 0 or more")
    return value or 0


def step_options(
    max_frames_per_traj: int | None, reset_at_each_iter: bool, clip_actions: bool
) -> StepOptions:
    """How to step. Raises as :func:`~distcollect.common.checks.positive` does."""
    checks.positive("max_frames_per_traj", max_frames_per_traj, optional=True)
    return StepOptions(max_frames_per_traj, reset_at_each_iter, clip_actions)
