"""What a user can do with every collector."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors import validation
from distcollect.collectors.buffer_filler import BufferFiller
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.stream import CollectorState, Hooks
from distcollect.common import checks
from distcollect.common.seeding import Stream, checked_seed, env_seed
from distcollect.errors import ArgumentError, CollectorStateError
from distcollect.integrations import load
from distcollect.pool.publisher import Weights, WorkerIds
from distcollect.results import EpisodeStats, Evaluation, LagStats, Stats
from distcollect.telemetry.bottleneck import Bottleneck, find_bottleneck
from distcollect.transport.peer_ids import identity
from distcollect.weights.push_handle import PushHandle

_STATE_FORMAT = 2
_FORMATS = (1, _STATE_FORMAT)  # that can be loaded


class DataCollectorBase(BufferFiller):
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
        frames_per_batch: frames in each batch.
        total_frames: frames after which it ends, a multiple of ``frames_per_batch``; -1: endless.
        compiled_policy, cudagraphed_policy: False: the collector calls the policy as it is given.
    """

    compiled_policy = cudagraphed_policy = False

    def __init__(self, options: CollectorOptions) -> None:
        """Build the collector, see :class:`~distcollect.collectors.stream.BatchStream`."""
        self._seed: tuple[int, bool] | None = None
        self._evaluated: Evaluation | None = None
        self._version_before_load: int | None = None  # set until a load has ended
        load("trainers")(type(self))
        super().__init__(options)

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
        return self._progress.lag

    @abstractmethod
    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        worker_ids: WorkerIds = None,
        wait: bool = True,
        **names: Any,
    ) -> PushHandle | None:
        """Publish new weights as the next ``policy_version``.

        Args:
            policy_or_weights: module, TensorDict of parameters or state dict; None: the collector's
                own policy.
            worker_ids: the workers to send the weights to; None: all.
            wait: return only when it is known which workers have the weights.
            names: TorchRL's other names: ``policy`` and ``weights`` stand for
                ``policy_or_weights``, ``model_id`` says which model they are for, and
                ``weights_dict`` has the weights of several models.

        Returns:
            A handle that says which workers have the weights; None without workers, or if nothing
            was published.

        Raises:
            WeightsError: the weights don't fit the policy; nothing was sent.
        """

    @property
    @abstractmethod
    def policy(self) -> Any:
        """The policy as it was given, or made by ``policy_factory``; None: random actions."""

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before each rollout, in the process that steps the envs.

        Assign a function, or None, to change it. With workers, what they have collected for the
        next batches is given up then, as by :meth:`set_seed`.
        """
        return self._hooks.pre_collect

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        validation.check_one("pre_collect_hook", hook)
        self._set_hooks(Hooks(hook, self._hooks.post_collect))

    @property
    def post_collect_hook(self) -> Callable[[TensorDict], Any] | None:
        """Called with each rollout, in the process that steps the envs.

        It is changed as :attr:`pre_collect_hook` is.
        """
        return self._hooks.post_collect

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[TensorDict], Any] | None) -> None:
        validation.check_one("post_collect_hook", hook)
        self._set_hooks(Hooks(self._hooks.pre_collect, hook))

    def set_post_collect_hook(self, hook: Callable[[TensorDict], Any] | None) -> None:
        """The same as assigning to :attr:`post_collect_hook`."""
        self.post_collect_hook = hook

    def enable_profile(self, **settings: Any) -> None:
        """Warn that it has no effect: here ``trace="FILE"`` records the run."""
        warnings.warn(
            f"enable_profile({', '.join(settings)}) has no effect here: pass trace='FILE' to the "
            "collector, or set a post_collect_hook that calls torch.profiler",
            stacklevel=2,
        )

    def disable_profile(self) -> None:
        """Nothing, see :meth:`enable_profile`."""

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy in this process."""
        return getattr(self.policy, attr)

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    @abstractmethod
    def getattr_env(self, attr: str) -> Any:
        """An attribute of the envs; with workers, of the first env of the first worker."""

    def increment_version(self) -> None:
        """Publish the policy's present weights as the next ``policy_version``."""
        self.update_policy_weights_()

    def get_policy_version(self) -> int:
        """The same as :attr:`policy_version`."""
        return self.policy_version

    def stats(self, workers: str = "aggregate") -> Stats:
        """Counts, rates and shares of time so far; also after :meth:`shutdown`.

        Time is counted from the first batch to the last. The figures of a worker are updated with
        each of its rollouts.

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
        newest = self._newest_evaluation()
        known = Stats(
            collector=type(self).__name__,
            evaluation=EpisodeStats() if newest is None else newest.summary(),
            frames=self._progress.frames,
            resumed_frames=self._progress.resumed_frames,
            total_frames=self.total_frames,
            policy_version=self.policy_version,
            ended=self._state is CollectorState.SHUT_DOWN,
            num_batches=self._progress.batches,
            frames_per_batch=self.frames_per_batch,
        )
        snapshot = self._snapshot(known)
        if workers == "per_worker":
            snapshot.clear()
        if workers != "aggregate":
            snapshot.update(snapshot.per_worker())
        return snapshot

    @abstractmethod
    def _snapshot(self, known: Stats) -> Stats:
        """``known`` with all other fields filled in."""

    def bottleneck(self) -> Bottleneck:
        """What limits the run so far, and what would help most; ``str()`` of it is a sentence."""
        return find_bottleneck(self.stats())

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``; without an updater nothing happens."""

    @abstractmethod
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
            CollectorStateError: the collector was shut down.
            ArgumentError, ArgumentTypeError: ``seed`` is not such a number; nothing has changed.
            DeadlineError: some workers are in a step that takes too long; names them.
            WorkerError: a worker could not take the seed, and is replaced.
        """

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
            ``{worker_id: values}``, with one value for each env of the worker, or a single one for
            a native vector env.

        Raises:
            EnvError: an env has no such method, or it raised. Names worker and env.
            ArgumentError, ArgumentTypeError: there is no such worker.
            DeadlineError: some workers didn't answer in time; names them, and where one hung also
                what it was doing.
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
        """Play whole episodes with the newest weights, in separate envs.

        ``max_frames_per_traj`` ends these episodes as well. :meth:`call` doesn't reach these envs.
        Collection continues afterwards where it was; these frames are not counted. If all workers
        are being replaced when it is called, it waits for the first one.

        Args:
            num_episodes: number of episodes in total, shared among all envs of these workers.
            worker_ids: the workers that play: an int, a list, a slice; None: all.
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
        limit_s = self._limit_s(timeout_s)
        result = self._evaluate(num_episodes, worker_ids, deterministic, seed, limit_s)
        self._evaluated = result
        return result

    def _newest_evaluation(self) -> Evaluation | None:
        """That of the newest version; None: there was none."""
        return self._evaluated

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
        """Counts, versions, seeds and ids for :meth:`load_state_dict`, as plain numbers.

        Weights and the envs' state are not included: save the weights with it. With TorchRL's envs,
        ``"policy_state_dict"`` has the weights of the policy in this process, as in the state of
        TorchRL's collectors. They are the policy's own tensors: save or copy them at once.
        """
        state: dict[str, Any] = {
            "format": _STATE_FORMAT,
            "frames": self._progress.frames,
            "policy_version": self.policy_version,
            "next_traj_id": identity().next_traj_id,
            "seed": self._seed,
            "resumes": self._progress.resumes,
        }
        if isinstance(self.policy, nn.Module) and self._layout.is_torchrl:
            state["policy_state_dict"] = self.policy.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another collector ended; its class and number of workers may differ.

        Frames and versions are counted from there, and no traj_id is used twice. If the policy has
        other weights than the state, it gets the state's, and so do the workers. Without weights in
        the state, the policy that this collector was made with is taken to be that of the state's
        ``policy_version``: load its weights before you make the collector, or send them afterwards.
        Unfinished trajectories are
        not continued. If there was a seed, the envs get new seeds derived from it, so that they
        don't repeat earlier episodes.

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
        if self._progress.batches:
            raise CollectorStateError(
                f"this collector has delivered {self._progress.frames:,} frames: call "
                "load_state_dict() on a new one, before its first batch"
            )
        if not isinstance(state, Mapping) or state.get("format") not in _FORMATS:
            raise ArgumentError(
                f"this is no state of a collector (format {_STATE_FORMAT}): {str(state)[:100]}; "
                "give what state_dict() returned"
            )
        version = self._version_before_load  # what an interrupted load has published doesn't count
        version = self.policy_version if version is None else version
        if state["policy_version"] < version:
            raise ArgumentError(
                f"the state has policy_version {state['policy_version']}, but this collector has "
                f"published version {version} already: load the state first"
            )
        frames, resumes = state["frames"], state["resumes"] + 1
        next_traj_id = state["next_traj_id"]
        if state["format"] == 1:
            next_traj_id = identity().above_format_1(next_traj_id)
        new_seed = None
        if state["seed"] is not None:
            seed, static_seed = state["seed"]
            new_seed = env_seed(seed, resumes, stream=Stream.RESUMED)

        def count() -> None:
            self._progress = replace(
                self._progress, frames=frames, resumed_frames=frames, resumes=resumes
            )

        again = self._version_before_load is not None
        self._version_before_load = version
        self._load_policy(state.get("policy_state_dict"), again)
        # From here on, workers may be waited for. If that is interrupted, load the state again.
        self._resume(state["policy_version"], next_traj_id, frames, count)
        if new_seed is not None:
            self.set_seed(new_seed, static_seed)
            self._seed = seed, static_seed
        self._version_before_load = None

    def _load_policy(self, weights: Mapping[str, Any] | None, again: bool) -> None:
        """Give the policy, and the workers, these weights, if the policy has others.

        ``again``: the workers get them in any case, as only the policy may have them so far.
        """
        if weights is None or not isinstance(self.policy, nn.Module):
            return
        own = self.policy.state_dict()
        same = own.keys() == weights.keys() and all(_same(own[name], weights[name]) for name in own)
        if same and not again:
            return
        try:
            self.policy.load_state_dict(weights)
        except RuntimeError as error:
            raise ArgumentError(f"the state has the weights of another policy: {error}") from error
        self.update_policy_weights_()

    @abstractmethod
    def _resume(
        self, version: int, first_traj_id: int, frames: int, count: Callable[[], None]
    ) -> None:
        """Continue with this policy_version and traj_id; ``frames`` were collected before.

        ``count`` counts them here; it is called together with what counts them elsewhere.
        """


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    return one.shape == other.shape and torch.equal(one, other.to(one.device))


# TorchRL's name for it.
BaseCollector = DataCollectorBase
