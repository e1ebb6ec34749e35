"""What a user can do with every collector."""

from __future__ import annotations

import copy
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from tensordict import TensorDict

from distcollect.collectors import validation
from distcollect.collectors.background import JOIN_TIMEOUT_S, Background
from distcollect.collectors.batches import Backend, Hooks
from distcollect.collectors.finalizer import Finalizer, close_later
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.replay import RateLimited, ReplayBuffer
from distcollect.collectors.resumption import Resumption
from distcollect.common import checks, signals, tensor_cache
from distcollect.common.forks import Owner
from distcollect.common.refusing import refusing
from distcollect.common.seeding import checked_seed
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    DistCollectError,
)
from distcollect.integrations import load
from distcollect.launch.main_call import ends_as_failed
from distcollect.policy.normalize import Normalizer
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.pool.remote_calls import EnvCall
from distcollect.results import Evaluation, LagStats, LedgerReport, Stats
from distcollect.telemetry.bottleneck import Bottleneck, find_bottleneck
from distcollect.telemetry.cells import rest_between_cells
from distcollect.telemetry.display import summary
from distcollect.telemetry.figures import checked_scalars
from distcollect.telemetry.monitor import MonitorThread
from distcollect.telemetry.recorder import StatsRecorder
from distcollect.transport.worker_service import EvaluationRequest
from distcollect.weights.push_handle import PushHandle

log = logging.getLogger(__name__)

_Self = TypeVar("_Self", bound="DataCollectorBase")
_T = TypeVar("_T")

# For the last statistics to be written.
_MONITOR_LIMIT_S = 60.0


def _weakly(method: Callable[[], _T]) -> Callable[[], _T | None]:
    """Return a function that calls ``method``; it returns None once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> _T | None:
        found = reference()
        return None if found is None else found()

    return call


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

    With a ``replay_buffer`` batches are added to the buffer instead: a loop over the collector
    yields None for each, or :meth:`start` fills the buffer in the background.

    :meth:`stats` gives counts, rates and shares of time, :meth:`bottleneck` what limits the run. A
    :class:`~distcollect.Monitor` shows these while the run goes on, and writes them to files.

    Attributes:
        compiled_policy, cudagraphed_policy: False: the collector calls the policy as it is given.
    """

    compiled_policy = cudagraphed_policy = False

    _backend_class: ClassVar[Callable[..., Backend]]
    _options: CollectorOptions
    _backend: Backend

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose own ``rollout()`` or ``iterator()`` a loop would not call.

        Raises:
            ArgumentTypeError: it has one of these methods.
        """
        super().__init_subclass__(**kwargs)
        for name in ("rollout", "iterator"):
            if getattr(cls, name) is not getattr(DataCollectorBase, name):  # its own, or of a mixin
                raise ArgumentTypeError(
                    f"class {cls.__name__}: its {name}() would not be called by a loop over the "
                    "collector. To change batches, pass postproc= or override next()"
                )

    def _open(self, options: CollectorOptions) -> None:
        """Open what steps the envs, and what shows and records the run.

        Raises:
            ArgumentError: a file or a port of the ``monitor`` can't be opened.
        """
        signals.forget_last_error()  # a cell that is run again closes what it opened before
        self._options = options
        self._owner = Owner()
        self._is_shut_down = self._is_released = False
        self._closes_envs = True
        self._has_failed = False  # whether an exception left the with-statement
        self._background: Background | None = None  # before start()
        load("trainers")(type(self))
        self._monitor_thread = monitor = MonitorThread(options.monitor, options.trace_path)
        self._close_monitor = Finalizer(self, partial(monitor.close, None), _MONITOR_LIMIT_S)
        self._stats_recorder = StatsRecorder(
            trace=monitor.trace, metrics=monitor.metrics, on_evaluation=monitor.evaluated
        )
        rest_between_cells(self._stats_recorder)
        try:
            self._backend = self._backend_class(options, self._stats_recorder)
        except BaseException:
            # Now, since the error keeps the collector for as long as somebody holds the error, as
            # notebooks do with the last one; a port of Prometheus would be taken until then.
            self._close_monitor()
            raise
        self._resumption = Resumption(self._backend)
        self._backend.begin = partial(monitor.begin, _weakly(self.stats))
        self._backend.on_failure = _weakly(self.shutdown)
        self._note_no_ctrl_c = signals.note_ctrl_c(self)
        try:
            load("check of a buffer")(options.replay_buffer, self._backend.layout)
        except BaseException:
            self.shutdown()
            raise

    # Frames and batches.

    @property
    def frames_per_batch(self) -> int:
        """Frames in each batch."""
        return self._backend.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """``frames_per_batch`` as given; with TorchRL's envs a batch may have more frames."""
        return self._options.frames_per_batch

    @property
    def total_frames(self) -> int:
        """Frames after which it ends, a multiple of ``frames_per_batch``; -1: endless."""
        return self._backend.total_frames

    @property
    def frames(self) -> int:
        """Frames collected so far, with padding and with those of the run that was resumed."""
        return self._backend.frames

    def __len__(self) -> int:
        """Number of batches in ``total_frames``, with those that were delivered already.

        With ``trajs_per_batch``: number of times that ``frames_per_batch`` frames are collected.

        Raises:
            TypeError: the collector is endless.
        """
        if self.total_frames == -1:
            raise ArgumentTypeError(
                "len(): this collector is endless: give it total_frames, or count the batches"
            )
        return self.total_frames // self.frames_per_batch

    def __repr__(self) -> str:
        """The class, the state, workers, envs, frames and policy_version."""
        if "_backend" not in vars(self) or not self._owner.is_here:  # being made, or another's
            return super().__repr__()
        return summary(self.stats(), self._backend.layout.num_envs)

    def __bool__(self) -> bool:
        """True: a collector without a length is not empty."""
        return True

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._is_shut_down

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The buffer to which batches are added; None: they are delivered."""
        return self._options.replay_buffer

    @property
    def init_random_frames(self) -> int:
        """Number of frames with random actions at the start, before it is rounded up."""
        return self._options.random_frames

    @property
    def abandoned_frames(self) -> int:
        """With ``trajs_per_batch``: frames of trajectories that will never be delivered."""
        return self._backend.abandoned_frames

    def iterator(self) -> Iterator[TensorDict]:
        """The same as iterating over the collector."""
        return iter(self)

    def rollout(self) -> TensorDict:
        """The same as :meth:`next`: its frames count towards ``total_frames``."""
        return self.next()

    def __iter__(self) -> Iterator[TensorDict]:
        """Batches until ``total_frames`` are collected; a second loop continues."""
        return self

    def __next__(self) -> TensorDict:
        """The same as :meth:`next`, so that ``next(collector)`` works."""
        return self.next()

    def next(self, timeout_s: float | None = None) -> TensorDict:
        """Wait for the next batch.

        Args:
            timeout_s: seconds to wait; None: ``Faults.batch_timeout_s``, with ``trajs_per_batch``
                for each of the rollouts that a batch needs, and with ``reset_at_each_iter`` too for
                the next whole trajectory.

        Returns:
            The batch; None if it went to the ``replay_buffer``.

        Raises:
            StopIteration: ``total_frames`` are collected.
            BatchTimeout: there was no batch in time; names the workers that it waited for.
            EnvError: an env raised too often; names the worker.
            PolicyError: the policy raised; names the worker.
            WorkerLost: fewer workers are left than ``Faults.min_workers``; says why.
            CollectorStateError: after :meth:`shutdown`, after :meth:`start`, while another thread
                waits for a batch of this collector, or within another call of it, as from
                ``postproc``.
            ArgumentError: ``postproc``, a hook or the buffer raised StopIteration. Their other
                exceptions pass through.
        """
        self._check_delivers()
        # None where the batch went to the replay buffer.
        return cast("TensorDict", self._take(timeout_s))

    def _take(self, timeout_s: float | None) -> TensorDict | None:
        try:
            with self._backend:
                return self._backend.next(timeout_s)
        except (KeyboardInterrupt, DistCollectError) as error:
            raise signals.cut(error) from error.__cause__

    def _check_open(self) -> None:
        if not self._owner.is_here:
            raise CollectorStateError(
                f"this process is a forked child of process {self._owner.pid}, which has the "
                "collector; only that process can use it"
            )
        if self._background is not None and (error := self._background.error) is not None:
            raise copy.copy(error) from error
        if self._is_shut_down:
            raise CollectorStateError("the collector was shut down: make a new one")
        signals.go_on_noting()

    def _check_delivers(self) -> None:
        self._check_open()
        if self._background is not None:
            if self._backend.is_over():
                raise CollectorStateError(
                    f"all total_frames={self.total_frames:,} are collected, and were added to the "
                    "replay buffer since start(): sample from that; a loop over the collector, or "
                    "next(), gets none of them"
                )
            raise CollectorStateError(
                "the collector fills its replay buffer in the background since start(): sample "
                "from that, or end it by async_shutdown()"
            )

    # In the background.

    def start(self) -> None:
        """Fill the replay buffer in the background, until ``total_frames`` are collected.

        The policy that collects is a copy; :meth:`update_policy_weights_` sends it new weights. Use
        :meth:`async_shutdown` to end. If collection fails, the next call to the collector raises
        the reason, and so does ``sample()`` of a :class:`~distcollect.RateLimited` buffer.

        Raises:
            CollectorStateError: there is no ``replay_buffer``, it was started already, another
                thread waits for a batch, or its class overrides :meth:`next`.
            ArgumentError: it has ``update_at_each_batch``, or it has ``models`` and no workers.
        """
        self._check_open()
        buffer = self._options.replay_buffer
        if buffer is None:
            raise CollectorStateError(
                "start() needs a replay_buffer to fill: pass replay_buffer= to the collector"
            )
        if type(self).next is not DataCollectorBase.next:
            raise CollectorStateError(
                f"start(): {type(self).__name__} has a next() of its own, which is not called in "
                "the background: iterate over the collector, or pass postproc= instead"
            )
        if getattr(self._options, "update_at_each_batch", False):
            raise ArgumentError(
                "start() and update_at_each_batch=True: the weights would be copied while you "
                "change them; leave it out and call update_policy_weights_() between two changes"
            )
        if self._background is not None:
            raise CollectorStateError(
                "the collector was started already: end that by async_shutdown(), or use pause()"
            )
        with self._backend:
            pass  # no other thread waits for a batch
        limit = buffer if isinstance(buffer, RateLimited) else None
        # Weakly, as the workers must end when the user drops the collector.
        background = Background(_weakly(self._fill), limit)
        self._backend.use(background)
        background.begin()
        self._background = background

    def _fill(self) -> bool:
        """Add one batch to the replay buffer; False if ``total_frames`` are collected."""
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
        return self._background.paused(self._backend.limit_s(timeout_s))

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started by :meth:`start`.

        Args:
            timeout: seconds to wait for the batch that is being collected, which is then added to
                the buffer; None: don't wait, and drop this batch.
            close_env: whether to close the envs. False leaves an env of yours open that this
                process steps; workers always close theirs.

        Raises:
            ArgumentError, ArgumentTypeError: ``timeout`` is negative, or no number.
            The error that ended collection in the background.
        """
        if timeout:
            timeout = checks.seconds(f"timeout={timeout!r}", timeout)
        background = self._background
        if background is not None:
            background.stop()
            if timeout is not None:
                background.join(timeout)
        self._closes_envs = close_env
        self.shutdown()
        if background is not None:
            background.join(JOIN_TIMEOUT_S)
        self._raise_from_background()

    def _raise_from_background(self) -> None:
        """Raise the error that ended collection in the background, once."""
        if self._background is not None and self._background.error is not None:
            error, self._background.error = self._background.error, None
            raise error

    # The end.

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End what the collector started and release what it holds. May be called again.

        A call that an exception broke off, such as Ctrl-C, is completed by the next one. In a
        forked child of the process that made the collector, it does nothing. From the handler of
        a signal that interrupted a call of the collector, it does not wait: that call ends first.

        Args:
            timeout: has no effect: ``Faults.stop_timeout_s`` is the limit for stopping workers.
            close_env: whether to close the envs. False leaves an env of yours open that this
                process steps; workers always close theirs.
            raise_on_error: False: errors of envs and workers that close are only logged.
        """
        if self._is_released or not self._owner.is_here:
            return
        signals.go_on_noting()
        self._closes_envs = self._closes_envs and close_env
        if signals.interrupts_us():
            self._is_shut_down = True
            close_later(self.shutdown)
            return
        try:
            self._shut_down()
        except Exception:
            if raise_on_error:
                raise
            log.exception("shutting down failed")

    def _shut_down(self) -> None:
        self._is_shut_down = True
        if self._background is not None:
            self._background.stop()
        self._stats_recorder.end()
        tensor_cache.forget()
        try:
            self._backend.close(close_envs=self._closes_envs, failed=self._has_failed)
        finally:
            self._monitor_thread.close(self.stats())
            self._close_monitor()
        self._is_released = True
        self._note_no_ctrl_c()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._has_failed = kind is not None and ends_as_failed(error)
        self.shutdown()
        if kind is None:
            self._raise_from_background()

    # Weights.
    @property
    def policy_version(self) -> int:
        """Version of the newest published weights; 0: those the policy started with.

        A frame's lag is the number of versions that were sent to its worker and are newer than the
        frame's ``("collector", "policy_version")``.
        """
        return self._backend.policy_version

    @property
    def version_lag(self) -> LagStats | None:
        """The lags of the last batch's frames when it was delivered; None before the first.

        With ``trajs_per_batch``, of the last rollouts that came, in which trajectories end.
        """
        return self._backend.lag

    @property
    def rests(self) -> frozenset[int]:
        """The ids of trajectories in the last batch that are the rest of an episode.

        What came before was dropped by a native vector env, is masked and so not in the replay
        buffer, or is in a rollout that was dropped or that another trainer got.
        """
        return frozenset(self._backend.rests)

    @property
    def policy_age(self) -> LagStats | None:
        """How many newer versions there were, for whichever workers, when it was delivered.

        It is above the lag for frames of workers that you left out: see ``worker_ids`` of
        :meth:`update_policy_weights_`.
        """
        return self._backend.age

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
        **names: Any,
    ) -> PushHandle | None:
        """Publish new weights as the next ``policy_version``.

        Workers swap them in between two steps. A worker that is late or dead, or whose copy arrives
        damaged, is left out; the handle says so. A late worker gets the newest weights as soon as
        it answers. Without workers, the weights are in use from the next frame on.

        Args:
            policy_or_weights: a module, a TensorDict of parameters or a state dict; with
                ``models``, a dict of these by name. None: the collector's own policy and models;
                if the weight updater gets weights from a server, these are loaded into them first.
                A dict by worker_id, without ``worker_ids``, sends each worker its own, as one
                version after the other.
                A copy is taken, so training may continue at once.
            worker_ids: the workers to send the weights to: an int, a list, a slice; a
                ``torch.device`` or several, for workers whose policy is there; "all" or None for
                all; "last_batch" for the workers whose frames are in the last batch; "lagging" for
                workers more than ``max_weight_update_interval`` versions behind this one. Without
                workers it must be None.
            wait: return only when it is known of every worker whether it has the weights. Otherwise
                return at once; if several versions wait to be sent, only the newest is sent. In
                sync mode a worker collects only when it has the newest version sent to it.
            names: TorchRL's other names: ``policy`` or ``weights``, in place of
                ``policy_or_weights``; ``model_id``, the one of ``models``, or "policy", that they
                are for; or ``weights_dict``, a dict of weights by these names. A model that is left
                out, or None, has the weights of the collector's own.

        Returns:
            A handle that says which workers have the weights: ``done()``, ``wait()``,
            ``acknowledged``, ``left_out``. None without workers, or if nothing is published, as the
            policy has no parameters, no worker is lagging, or those of the last batch have left.
            For weights by worker_id, the handle of the last worker.

        Raises:
            WeightsError: a key is missing or unknown, has another shape or dtype, or a value that
                ``WeightSync`` refuses. Names the key; nothing was sent.
            ArgumentError, ArgumentTypeError: there is no such worker, or nothing to send. Nothing
                was sent.
            WeightsTimeout: no worker acknowledged in time; names them.
            WorkerLost: a worker had died before.
            WorkerError: no worker could receive the weights.
        """
        self._check_open()
        weights = load("names of weights")(
            policy_or_weights, names, self.policy, self._options.named_models
        )
        return self._backend.publish(weights, worker_ids, wait=wait)

    @property
    def policy(self) -> Any:
        """The policy as it was given, or made by ``policy_factory``; None: random actions."""
        return self._backend.policy

    @property
    def ledger(self) -> LedgerReport:
        """What became of all frames that were stepped: delivered, or lost and why.

        The count of a worker is updated with each of its rollouts, and at its end.
        """
        return self._backend.ledger

    @property
    def normalizer(self) -> Normalizer | None:
        """What the policy's observations go through, as published last; None without ``normalize``.

        A module: ``nn.Sequential(collector.normalizer, policy)`` acts as the workers do. It goes on
        to change: copy it to keep it.
        """
        return None if self._backend.statistics is None else self._backend.statistics.normalizer

    def normalize(self, frames: TensorDict) -> TensorDict:
        """Normalise raw frames, such as a sample of a replay buffer, by the newest statistics.

        Args:
            frames: of any batch size; it is not changed. An observation alone will do.

        Returns:
            The same frames, with observations (also under "next") normalised as by the newest
            published statistics, and rewards scaled by those of all frames so far.

        Raises:
            ArgumentError: the collector was made without ``normalize``.
        """
        return self._backend.normalized(frames)

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before each rollout, in the process that steps the envs.

        Assign a function, or None, to change it. With workers, what they have collected for the
        next batches is given up then, as by :meth:`set_seed`.
        """
        return self._backend.hooks.pre_collect

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        validation.check_one("pre_collect_hook", hook)
        self._set_hooks(self._backend.hooks._replace(pre_collect=hook))

    @property
    def post_collect_hook(self) -> Callable[[TensorDict], Any] | None:
        """Called with each rollout, in the process that steps the envs.

        It is changed as :attr:`pre_collect_hook` is.
        """
        return self._backend.hooks.post_collect

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDict], Any] | None) -> None:
        validation.check_one("post_collect_hook", hook)
        self._set_hooks(self._backend.hooks._replace(post_collect=hook))

    def _set_hooks(self, hooks: Hooks) -> None:
        self._check_open()
        self._backend.set_hooks(hooks)

    def set_post_collect_hook(self, hook: Callable[[TensorDict], Any] | None) -> None:
        """The same as assigning to :attr:`post_collect_hook`."""
        self.post_collect_hook = hook

    def enable_profile(self, **settings: Any) -> None:
        """Have TorchRL's profiler record the first rollouts, in the process that steps the envs.

        Args:
            settings: those of TorchRL's method of this name.

        Raises:
            ArgumentError: TorchRL is not installed, or refuses them.
            CollectorStateError: there was a batch already.
        """
        if self._backend.batches:
            raise CollectorStateError(
                "Cannot enable profiling after iteration has begun: call enable_profile() before "
                "the first batch"
            )
        self.disable_profile()
        remedy = "it needs TorchRL, and takes the fields of its ProfileConfig"
        with refusing("enable_profile() can't do this", remedy, Exception):
            hook = load("profiler")(
                self.post_collect_hook, settings, has_workers=bool(self._map_targets)
            )
        self.post_collect_hook = hook

    def disable_profile(self) -> None:
        """End what :meth:`enable_profile` began, if there is anything."""
        if self.profile_config is not None:
            hook: Any = self.post_collect_hook
            hook.stop()
            self.post_collect_hook = hook.before

    @property
    def profile_config(self) -> Any:
        """TorchRL's ``ProfileConfig`` of the profile that is enabled; None: none is."""
        return getattr(self.post_collect_hook, "profile_config", None)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy in this process."""
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    @abstractmethod
    def getattr_env(self, attr: str) -> Any:
        """An attribute of the envs; with workers, of the first env of the first worker."""

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[tuple[Any, ...]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, by TorchRL's names; see also :meth:`call`.

        Without workers, call a method of this collector once for each of several arguments.

        Args:
            method_name: as for ``get_distant_attr``.
            list_of_args: positional arguments, one tuple for each call.
            list_of_kwargs: keyword arguments, one dict for each call.

        Returns:
            The result of each call, in the order of worker_id; of several envs a list.

        Raises:
            ArgumentError: there is nothing of this name, or a list has another length.
        """
        self._check_open()
        targets = self._map_targets or [0] * len(list_of_args or list_of_kwargs or "1")
        for name, given in (("list_of_args", list_of_args), ("list_of_kwargs", list_of_kwargs)):
            if given is not None and len(given) != len(targets):
                raise ArgumentError(
                    f"Expected {len(targets)} argument entries in {name}, not {len(given)}: both "
                    "lists must have the same length, and with workers one entry for each"
                )
        args, kwargs = list_of_args or [()] * len(targets), list_of_kwargs or [{}] * len(targets)
        return [
            self._map_one(worker_id, method_name, *each, **named)
            for worker_id, each, named in zip(targets, args, kwargs, strict=True)
        ]

    @property
    def _map_targets(self) -> Sequence[int]:
        """Ids of the workers of which each gets one call of :meth:`map_fn`; empty without any."""
        return ()

    @abstractmethod
    def _map_one(self, worker_id: int, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method, or read the attribute, that ``path`` names."""

    def increment_version(self) -> None:
        """Publish the policy's present weights as the next ``policy_version``."""
        self.update_policy_weights_()

    def get_policy_version(self) -> int:
        """The same as :attr:`policy_version`."""
        return self.policy_version

    def stats(self, workers: str = "aggregate") -> Stats:
        """Counts, rates and shares of time so far; also after :meth:`shutdown`.

        Time is counted from the first batch to the last, without that between the end of a cell of
        a notebook and the next batch. The figures of a worker are updated with each of its
        rollouts.

        Args:
            workers: which entries the result has as a dict: "aggregate", those of the collector;
                "per_worker", those of each worker, such as "worker_0/frames"; or "both".

        Raises:
            ArgumentError: ``workers`` is none of these.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ArgumentError(
                f"stats(workers={workers!r}): workers must be one of 'aggregate', 'per_worker' and "
                "'both'"
            )
        snapshot = self._backend.stats(type(self).__name__, ended=self._is_shut_down)
        if workers == "per_worker":
            snapshot.clear()
        if workers != "aggregate":
            snapshot.update(snapshot.per_worker())
        return snapshot

    def bottleneck(self) -> Bottleneck:
        """What limits the run so far, and what would help most; ``str()`` of it is a sentence."""
        return find_bottleneck(self.stats())

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers of yours, such as losses, to what is shown and written about the run.

        The last of each name are on the terminal, in ``stats().logged`` and, with a ``run_dir``,
        every ``every_s`` in ``stats.jsonl``, of which the report makes curves. TensorBoard gets
        each.

        Args:
            values: numbers by name: floats, ints, or tensors with one element; NaN too. A name
                has letters, digits and ``_ . / -``.
            step: where TensorBoard plots them; None: at the number of frames.

        Raises:
            ArgumentError: a name can't be plotted; nothing was logged.
            ArgumentTypeError: a value is no number, or ``step`` no whole number.
            CollectorStateError: the collector was shut down.
        """
        self._check_open()
        scalars, step = checked_scalars(values), checks.plain(step)
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise ArgumentTypeError(f"log(step={step!r}): must be a whole number")
        self._stats_recorder.log(scalars)
        self._monitor_thread.log(scalars, self.frames if step is None else step)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - without an updater
        """Pass arguments to the weight updater's ``init``; without an updater nothing happens."""

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all envs and the policies' randomness; the next batch starts with a reset.

        In async mode, workers begin to collect when the first batch is requested, so a seed that is
        set before costs no frames. Later, a worker takes the seed after the step that it is in, and
        what it has collected for the next batches is given up: the ledger counts these frames as
        lost by "given_up". If an exception ends the wait for the workers (a deadline, Ctrl-C), all
        workers take the seed nevertheless, before they collect anything else.

        Env i gets a seed derived from (``seed``, i), however the envs are spread over workers. The
        random numbers that the policy draws for env i with torch's functions come from a stream
        derived in the same way. So trajectories don't depend on the number of workers, as long as
        the policy's result for one env doesn't depend, by rounding, on the number of envs that it
        is called with.

        Random numbers that the policy draws in other ways come from one generator per worker, and
        so depend on the number of workers: those that compiled code draws itself, those within
        ``nn.LSTM``, ``nn.GRU`` and ``nn.RReLU``, and tensors whose first dimension is not that of
        the envs (or a multiple of it, as for several agents). So do those that envs and policies
        draw from numpy's and Python's global generators. These, and torch's, are seeded in each
        process that steps envs; for collectors without workers that is this process.

        Seeding costs time in the policy: with 16 CartPole envs and a small network a frame takes
        1.1 times as long; with larger envs and networks the factor is smaller. Without a seed there
        is no cost.

        Args:
            seed: a whole number, 0 or more.
            static_seed: all envs get the same seed, instead of one each.

        Returns:
            A seed that none of the envs uses, for another collector; with TorchRL's envs the one
            that TorchRL's collector returns.

        Raises:
            CollectorStateError: the collector was shut down, or collects in this process, in the
                background.
            ArgumentError, ArgumentTypeError: ``seed`` is not such a number; nothing has changed.
            DeadlineError: some workers are in a step that takes too long; names them.
            WorkerError: a worker could not take the seed, and is replaced.
        """
        self._check_open()
        if self._background is not None and not self._options.has_workers:
            raise CollectorStateError("set_seed() must come before start()")
        self._resumption.seed = checked_seed(seed), bool(static_seed)
        self._backend.drop_trajectories()
        return self._backend.seed(*self._resumption.seed)

    def call(
        self,
        method: str,
        *args: Any,
        worker_ids: WorkerIds = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> dict[int, list[Any]]:
        """Call a method of the envs between two of their steps, or read an attribute of them.

        A rollout that is being collected is continued afterwards. (A collector that steps envs in
        this process, in the background, finishes it first.) A worker that replaces a lost one has
        new envs, without the effect of earlier calls.

        Args:
            method: the name of the method or attribute; it is also searched for inside wrappers.
            args: arguments for the method; they and its result are pickled.
            worker_ids: the workers whose envs are called: an int, a list, a slice; None: all.
            timeout_s: seconds for the whole call; None: ``Faults.batch_timeout_s``. A worker whose
                envs take longer for it is taken to hang, and is replaced.
            kwargs: keyword arguments for the method.

        Returns:
            ``{worker_id: values}``, with one value for each env of the worker, or a single one of a
            native vector env, or of a vector env's wrapper.

        Raises:
            EnvError: an env has no such method, or it raised. Names worker and env.
            ArgumentError, ArgumentTypeError: there is no such worker.
            DeadlineError: some workers didn't answer in time; names them, and where one hung also
                what it was doing.
            WorkerLost: a worker that was named is lost.
        """
        self._check_open()
        call = EnvCall(method, args, kwargs, self._backend.limit_s(timeout_s))
        return self._backend.call(call, worker_ids)

    def evaluate(
        self,
        num_episodes: int = 10,
        *,
        worker_ids: WorkerIds = None,
        deterministic: bool = True,
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Evaluation:
        """Play whole episodes with the newest weights, in separate envs.

        ``max_frames_per_traj`` ends these episodes as well. :meth:`call` doesn't reach these envs.
        Collection continues afterwards where it was; these frames are not counted. If all workers
        are being replaced when it is called, it waits for the first one.

        Where this process steps the envs, the global random generators are afterwards as they were
        before. What other threads draw from them meanwhile comes again: also another collector's
        that was started, unless it was seeded.

        Args:
            num_episodes: number of episodes in total, shared among all envs of these workers.
            worker_ids: the workers that play, each in its own kind of envs if there is a list of
                makers: an int, a list, a slice; None: all that collect, so not those that
                :class:`EvaluationWorkers` reserves.
            deterministic: take the most likely action, where the policy has a distribution.
            seed: seeds envs and actions, for the same episodes each time; None: a random seed.
            timeout_s: seconds for all episodes; None: ``Faults.batch_timeout_s``.

        Returns:
            Returns, lengths, policy version and metrics of each episode.

        Raises:
            EnvError, PolicyError: an env or the policy failed.
            ArgumentError, ArgumentTypeError: there is no such worker, or the collector was given an
                env itself instead of an env maker.
            DeadlineError: not all episodes ended in time, or no worker came.
            WorkerLost: a worker that was named is lost, or all are.
        """
        self._check_open()
        num_episodes = checks.plain(num_episodes)
        checks.positive("num_episodes", num_episodes)
        seed = None if seed is None else checked_seed(seed)
        limit_s = self._backend.limit_s(timeout_s)
        request = EvaluationRequest(
            num_episodes, deterministic, seed, limit_s, with_weights=bool(self._stats_recorder.best)
        )
        evaluation = self._backend.evaluate(request, worker_ids)
        self._stats_recorder.evaluated(evaluation)
        return replace(evaluation, weights=None)

    def state_dict(self) -> dict[str, Any]:
        """Counts, versions, seeds and ids for :meth:`load_state_dict`, as plain numbers.

        With ``normalize``, the statistics too.
        Weights and the envs' state are not included: save the weights with it. With TorchRL's envs,
        ``"policy_state_dict"`` has the weights of the policy in this process, as in the state of
        TorchRL's collectors. They are the policy's own tensors: save or copy them at once. There
        are also "worker0" and so on, for each worker, with the same weights and version.
        """
        return self._resumption.state_dict(self._map_targets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another collector ended; its class and number of workers may differ.

        Frames and versions are counted from there, and no traj_id is used twice. If the state has
        weights, the policy and the workers get these. Without, the policy that this collector was
        made with is taken to be that of the state's ``policy_version``: load its weights before you
        make the collector, or send them afterwards. Unfinished trajectories are not continued. If
        there was a seed, the envs get new seeds derived from it, so that they don't repeat earlier
        episodes.

        Args:
            state: from :meth:`state_dict`.

        Raises:
            CollectorStateError: this collector has delivered frames already.
            ArgumentError: ``state`` is not from :meth:`state_dict`, is behind this collector, or
                has the weights of another policy.
            LaunchError: the run has used nearly all trajectory ids.
            DeadlineError, WorkerError: the workers did not accept the state.
        """
        self._check_open()
        self._resumption.load(state, self.set_seed)

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            f"a {type(self).__name__} can't be pickled or copied, as it has envs and processes: "
            "pass on what it delivers, or its state_dict()"
        )


# TorchRL's name for it.
BaseCollector = DataCollectorBase
