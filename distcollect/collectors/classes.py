"""The collectors: one that steps envs in the calling process, and those with workers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from tensordict import TensorDict

from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.in_process import InProcess
from distcollect.collectors.options import (
    AsyncOptions,
    DistributedOptions,
    DistributedSyncOptions,
    MultiAsyncOptions,
    MultiSyncOptions,
    RPCOptions,
    SyncOptions,
    WorkerOptions,
)
from distcollect.collectors.signature import takes
from distcollect.collectors.with_workers import WithWorkers
from distcollect.common import checks
from distcollect.envs.base import called
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError
from distcollect.integrations import load
from distcollect.pool.handover import RolloutReference
from distcollect.results import Evaluation, WorkerState, WorkerThroughput


class SyncDataCollector(DataCollectorBase):
    """Steps envs in the calling process; a batch is collected when it is requested.

    The policy is shared, not copied: training it in place shows in the next batch. In the
    background, after ``start()``, it is copied. Batches are ``[T]`` for one env, ``[n, T]`` for n.

    In the background, a thread of this process steps the envs, and settings of the whole process
    apply to both: TorchRL's losses, for example, set the exploration type of all TensorDict modules
    while they compute. In that case use :class:`aSyncDataCollector`.

    Envs that it made are closed by :meth:`shutdown`, at exit, and when nobody refers to the
    collector any more; envs of yours that you passed only by :meth:`shutdown`.
    """

    _backend_class = InProcess
    _options: SyncOptions
    _backend: InProcess

    @takes(SyncOptions)
    def __init__(self, options: SyncOptions) -> None:
        """Make the envs, and try envs and policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        self._open(options)

    @property
    def env(self) -> Any:
        """The env that it steps, or a list of several."""
        envs = self._backend.engine.envs.members
        return envs[0] if len(envs) == 1 else envs

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the env, or of the first one of several."""
        return getattr(self._backend.engine.envs.members[0], attr)

    def get_distant_attr(self, attr: str) -> Any:
        """An attribute of this collector, or with dots of its parts, such as "env.specs"."""
        return operator.attrgetter(attr)(self)

    def _map_one(self, worker_id: int, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.get_distant_attr(path)(*args, **kwargs)

    def fake_tensordict(self) -> TensorDict:
        """A batch of zeros, with the entries and the shape of the batches that it will deliver.

        Raises:
            CollectorStateError: with ``split_trajs`` or ``trajs_per_batch``, or with an env whose
                entries change their shapes: there a batch has no fixed shape.
        """
        self._check_open()
        splits = self._options.split_trajs or self._options.trajs_per_batch is not None
        if splits or self._backend.layout.is_loose:
            raise CollectorStateError(
                "fake_tensordict(): batches of this collector have no fixed shape: take a batch"
            )
        return self._backend.zeros()

    def reset(self) -> None:
        """Start the next batch with a reset of all envs.

        With ``trajs_per_batch``, the trajectories that were not delivered are dropped.
        """
        self._check_open()
        self._backend.drop_trajectories()
        self._backend.engine.reset()


class RPCDataCollector(DataCollectorBase):
    """Steps envs in worker processes, on this host or on others, each with a copy of the policy.

    Within :func:`~distcollect.run` under torchrun or srun, the launch's other ranks are the
    workers; otherwise the collector starts ``num_workers`` local processes.

    It also accepts the arguments of TorchRL's ``RPCCollector`` under their names.
    """

    _backend_class = WithWorkers
    _options: WorkerOptions
    _backend: WithWorkers

    @takes(RPCOptions)
    def __init__(self, options: RPCOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong; nothing was started.
            CollectorStateError: another open collector has the launch's workers; nothing was
                started.
            EnvError, PolicyError: an env or the policy failed when a worker tried it.
            WorkerLost, WorkerMismatch, DeadlineError: a worker did not start, or did not join. In
                all these cases nothing is left running.
        """
        self._open(options)

    def _open(self, options: Any) -> None:
        super()._open(options)
        self._backend.updater.register_collector(self)
        self._backend.ends_with(self)

    @property
    def num_workers(self) -> int:
        """Number of workers that are present now, without those being replaced."""
        return self._backend.workers.num_present

    @property
    def worker_states(self) -> dict[int, WorkerState]:
        """State of each worker, by worker_id."""
        return self._backend.workers.states

    @property
    def worker_paces(self) -> dict[int, WorkerThroughput]:
        """How fast each worker is, by worker_id: shows which workers delay the others."""
        return self._backend.pool.paces

    def release(self, worker_ids: int | Sequence[int]) -> None:
        """Send workers away for good, and wait until they have left.

        They finish the rollout that they are collecting, within ``Faults.leave_timeout_s``, and it
        is delivered. They are not replaced; with fewer than ``Faults.min_workers`` left the run
        ends with an error.

        Args:
            worker_ids: one worker or several.

        Raises:
            ArgumentError, ArgumentTypeError: there are no such workers.
            DeadlineError: the workers did not leave in time.
        """
        self._check_open()
        selected = checks.worker_ids(worker_ids, self._backend.pool.worker_ids)
        self._backend.workers.release(selected or ())

    @property
    def stale_frames(self) -> dict[int, int]:
        """Number of frames that were dropped or masked as too stale, by worker_id."""
        return self._backend.pool.stale_frames

    # TorchRL's names.

    @property
    def preemptive_threshold(self) -> float:
        """The share of a sync batch's rollouts that preempts the other workers; 1: none are."""
        share = self._options.preemptive_threshold
        return 1.0 if share is None else float(share)

    @property
    def interruptor(self) -> None:
        """None: nothing that workers share is needed to preempt them."""

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first worker's first env, or what that method of it returns."""
        first = min(self._backend.pool.worker_ids)
        return self.call(attr, worker_ids=first)[first][0]

    def get_distant_attr(self, attr: str) -> list[Any]:
        """An attribute of each worker, by TorchRL's names.

        Args:
            attr: "worker_idx"; "frames_per_batch", of one worker; with dots an attribute of its
                envs, such as "env.specs", or of the collector's buffer: "replay_buffer.storage".

        Raises:
            ArgumentError: workers have nothing of this name.
        """
        return self.map_fn(attr)

    @property
    def _map_targets(self) -> Sequence[int]:
        return sorted(self._backend.pool.worker_ids)

    def _map_one(self, worker_id: int, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "get_distant_attr":
            [path], args, kwargs = [*args, *kwargs.values()], (), {}
        if path == "worker_idx":
            return worker_id
        if path == "frames_per_batch":
            return self.frames_per_batch // self._options.rollouts_per_batch
        part, _, name = path.partition(".")
        if part == "env" and name:
            results = self.call(name, *args, worker_ids=worker_id, **kwargs)[worker_id]
            return results[0] if len(results) == 1 else results
        if part == "replay_buffer" and name and self.replay_buffer is not None:
            return called(operator.attrgetter(name)(self.replay_buffer), args, kwargs)
        raise ArgumentError(
            f"{path!r}: workers step envs, and are no collectors; what can be read of them is "
            "'worker_idx', 'frames_per_batch', 'env.NAME' and 'replay_buffer.NAME'"
        )

    def fake_tensordict(self) -> TensorDict:
        """Not possible with workers.

        Raises:
            NotImplementedError: always; says what to use instead.
        """
        raise NotImplementedError(
            "fake_tensordict() is for collectors without workers: take a batch and fill it with "
            "zeros, as in collector.next().zero_()"
        )

    def reset(self) -> None:
        """Not possible while workers collect.

        Raises:
            CollectorStateError: always; says what to use instead.
        """
        raise CollectorStateError(
            "workers can't be told to reset: set_seed() starts all envs over, and "
            "reset_at_each_iter=True resets them before each rollout"
        )

    # Rollouts of other trainers.

    def hand_over(
        self, timeout_s: float | None = None, *, keep_s: float = 60.0
    ) -> RolloutReference:
        """Give the next rollout to another trainer of the launch, without fetching it.

        Send the reference as you like (a queue, ``torch.distributed.send_object_list``); the other
        trainer's :meth:`take_over` fetches the frames directly from the worker. The :attr:`ledger`
        counts them as delivered once that trainer has them, and otherwise as lost: by "not_taken"
        after ``keep_s``, "worker_lost", or "shut_down" if this collector ends before. They count
        towards ``total_frames`` here in any case, and :class:`Staleness` limits their lag now, not
        when they are taken. Until then they occupy one of the worker's two rollout buffers, which
        it uses in turn: it collects one more rollout, and then waits until this one was taken.

        If you also call :meth:`next`, rollouts may have been fetched in advance for it. These are
        kept for it, unless no other rollout is being collected: then the frames travel with the
        reference, and count as delivered when it is made.

        Args:
            timeout_s: seconds to wait for the rollout, instead of ``Faults.batch_timeout_s``.
            keep_s: seconds for which the worker keeps the rollout, counted from now.

        Returns:
            A reference to be pickled and sent to the other trainer.

        Raises:
            StopIteration: ``total_frames`` are collected.
            ArgumentError: ``keep_s`` is not above 0, or above 1e8.
            ArgumentTypeError: ``keep_s`` is no number.
            CollectorStateError: in sync mode, with ``reproducible``, ``trajs_per_batch`` or
                ``normalize``.
            BatchTimeout, EnvError, PolicyError, WorkerLost: as :meth:`next`.
        """
        self._check_hands_over("hand_over")
        keep_s = checks.seconds(f"keep_s={keep_s!r}", keep_s)
        with self._backend:
            return self._backend.hand_over(timeout_s, keep_s)

    def take_over(self, reference: RolloutReference, timeout_s: float | None = None) -> TensorDict:
        """Fetch a rollout that another trainer handed over, directly from its worker.

        This process must be able to reach the worker at the address by which the worker reaches its
        own trainer. The frames keep their versions, and their ids where no frame before them is
        missing; ``("collector", "worker_id")`` is the worker's id at the other trainer. Their lag
        is measured against all versions of this trainer. They don't count towards ``total_frames``
        here, and are in the other trainer's ledger. A reference can be used once, even if that
        fails.

        Args:
            reference: what :meth:`hand_over` returned.
            timeout_s: seconds for the worker to deliver it, instead of ``Faults.batch_timeout_s``.

        Returns:
            The batch ``[n, T]``, as :meth:`next` gives it.

        Raises:
            RolloutGone: it was taken already, ``keep_s`` has passed, or its worker is gone; names
                the worker.
            DeadlineError: the worker didn't answer in time; names it.
            ArgumentError, ArgumentTypeError: this is not a reference of this launch.
            CollectorStateError: as :meth:`hand_over`.
        """
        self._check_hands_over("take_over")
        if not isinstance(reference, RolloutReference):
            raise ArgumentTypeError(
                f"take_over({reference!r}): must be what another trainer's hand_over() gave"
            )
        with self._backend:
            # None where the batch went to the replay buffer.
            return cast("TensorDict", self._backend.take_over(reference, timeout_s))

    def _check_hands_over(self, method: str) -> None:
        self._check_delivers()
        reason = ""
        if self._options.sync:
            reason = "is for sync=False: in sync mode a batch is a rollout of every worker"
        elif self._options.reproducible:
            reason = "is not for reproducible=True: the order depends on timing"
        elif self._options.trajs_per_batch is not None:
            reason = "is not for trajs_per_batch: trajectories span rollouts"
        elif self._options.normalize is not None:
            reason = "is not for normalize: another trainer does not know the policy's statistics"
        if reason:
            raise CollectorStateError(f"{method}() {reason}")

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``."""
        self._check_open()
        self._backend.updater.init(*args, **kwargs)

    @property
    def evaluations(self) -> list[Evaluation]:
        """Results of the :class:`EvaluationWorkers`, in the order in which they came."""
        return list(self._backend.evaluations)


class DistributedDataCollector(RPCDataCollector):
    """The same as :class:`RPCDataCollector` with ``transport="tcp"``.

    TorchRL's collector of this name uses a process group. This one leaves that of the script alone,
    and opens none: all goes over the connections by which workers join.
    """

    @takes(DistributedOptions)
    def __init__(self, options: DistributedOptions) -> None:
        """Start or find the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class DistributedSyncDataCollector(DistributedDataCollector):
    """The same as :class:`DistributedDataCollector` with ``sync=True``."""

    @takes(DistributedSyncOptions)
    def __init__(self, options: DistributedSyncOptions) -> None:
        """Start or find the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class MultiSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes; a batch is one rollout from each, collected on request.

    Its shape, with W workers of n envs and T steps each:

    | `cat_results` | "stack"     | 0            | -1           |
    |---------------|-------------|--------------|--------------|
    | one env       | `[W, T]`    | `[W * T]`    | `[W * T]`    |
    | n envs        | `[W, n, T]` | `[W * n, T]` | `[n, W * T]` |
    """

    @takes(MultiSyncOptions)
    def __init__(self, options: MultiSyncOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class MultiaSyncDataCollector(RPCDataCollector):
    """Steps envs in local worker processes, which keep collecting while the trainer works.

    A batch is a rollout from whichever worker is done first: ``[T]`` with one env per worker,
    ``[n, T]`` with n.
    """

    @takes(MultiAsyncOptions)
    def __init__(self, options: MultiAsyncOptions) -> None:
        """Start the workers, and have each try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


class aSyncDataCollector(RPCDataCollector):  # noqa: N801 - TorchRL's name for it
    """Steps envs in one local worker process, which keeps collecting while the trainer works.

    A batch is ``[T]`` for one env, ``[n, T]`` for n.
    """

    @takes(AsyncOptions)
    def __init__(self, options: AsyncOptions) -> None:
        """Start the worker, and have it try its envs and the policy.

        Raises:
            DistCollectError: the errors of :class:`RPCDataCollector`.
        """
        self._open(options)


# TorchRL's other names.
RPCCollector = RPCDataCollector
DistributedCollector = DistributedDataCollector
DistributedSyncCollector = DistributedSyncDataCollector
AsyncCollector = aSyncDataCollector
MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector

_BACKENDS = {
    "direct": "direct",
    "process": "process",
    "multiprocessing": "process",
    "rpc": "rpc",
    "distributed": "distributed",
    "submitit": "rpc",
    "ray": "ray",
}


@dataclass(frozen=True, eq=False)
class GenericOptions(SyncOptions):
    """Arguments of :class:`~distcollect.Collector`, where it steps envs in this process.

    Attributes:
        backend: where envs are stepped: "direct" in this process, "process" in local worker
            processes, "rpc" or "distributed" in workers on any hosts, which differ by their
            ``transport``, "ray" in workers that a Ray cluster starts; None: that of TorchRL's
            ``service_backend``, or "process" if ``num_collectors`` is given, else "direct".
        backend_options: further arguments for the collector that the backend selects.
        num_collectors: number of workers; None: one for each maker in a list, else one.
        sync: with workers, True: a batch is one rollout from each; False: from one of them.
        worker_idx: without workers, the ``worker_id`` that env makers with a parameter named
            ``context`` are given; None: 0.
    """

    _: KW_ONLY
    backend: str | None = None
    backend_options: Mapping[str, Any] | None = None
    num_collectors: int | None = None
    sync: bool | None = None
    worker_idx: int | None = None

    @property
    def worker_id(self) -> int:
        return self.worker_idx or 0


class Collector(SyncDataCollector):
    """TorchRL's name for all collectors: ``backend`` and ``num_collectors`` select one.

    By default it is a :class:`SyncDataCollector`, which steps envs in the calling process. With
    ``backend="process"`` or ``num_collectors`` the call returns a :class:`MultiSyncDataCollector`
    (``sync=True``) or a :class:`MultiaSyncDataCollector`; with ``backend="rpc"`` or "distributed" a
    :class:`RPCDataCollector`; with "ray" a :class:`RayDataCollector`. These take the arguments of
    that class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the collector that the arguments select.

        Raises:
            ArgumentError, ArgumentTypeError: the arguments contradict each other.
        """
        if cls is not Collector:
            return super().__new__(cls)
        backend = _backend(kwargs)
        if backend != "direct":
            return _with_workers(backend, args, kwargs)
        _check_direct(kwargs)
        return super().__new__(cls)

    _options: GenericOptions

    @property
    def worker_idx(self) -> int | None:
        """``worker_idx`` as it was given."""
        return self._options.worker_idx

    @takes(GenericOptions)
    def __init__(self, options: GenericOptions) -> None:
        """Make the envs, and try envs and policy.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
            EnvError, PolicyError: an env or the policy failed when tried.
        """
        self._open(options)


# What inspect.signature() and help() show of the class.
setattr(Collector.__new__, "__signature__", inspect.signature(Collector.__init__))  # noqa: B010


def _backend(kwargs: Mapping[str, Any]) -> str:
    given, origin = kwargs.get("backend"), ""
    count = checks.plain(kwargs.get("num_collectors"))
    checks.positive("num_collectors", count, optional=True)
    if given is None:
        given, origin = (
            load("backend of a context")(),
            " of an enclosing torchrl.service_backend context",
        )
    if given is None:
        return "direct" if count is None else "process"
    if given not in _BACKENDS:
        names = ", ".join(map(repr, _BACKENDS))
        raise ArgumentError(f"backend={given!r}{origin}: use one of {names}")
    return _BACKENDS[given]


def _check_direct(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("num_collectors") not in (None, 1):
        raise ArgumentError(
            "backend='direct' has at most one collector, in this process: use backend='process'"
        )
    for name in ("sync", "backend_options"):
        if kwargs.get(name):
            raise ArgumentError(f"{name} is for collectors with workers, and backend is 'direct'")


def _with_workers(backend: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The collector with workers that the arguments select."""
    given = dict(kwargs)
    name, options = given.pop("backend", None), given.pop("backend_options", None) or {}
    if twice := options.keys() & {*given, *("create_env_fn", "policy")[: len(args)]}:
        raise ArgumentError(f"backend_options has duplicates of arguments: {sorted(twice)}")
    # TorchRL's backends have an argument `backend` too: "gloo" or "nccl".
    given.update(options)
    if name == "submitit" and given.setdefault("launcher", "submitit") != "submitit":
        raise ArgumentError("backend='submitit' requires launcher='submitit'")
    sync = given.pop("sync", None)
    if sync is not None and not isinstance(sync, bool):
        raise ArgumentTypeError(f"sync={sync!r}: must be True or False")
    makers = args[0] if args else given.get("create_env_fn")
    if not isinstance(makers, list | tuple):
        given.setdefault("num_collectors", 1)
    if backend == "process":
        return MultiCollector(*args, sync=bool(sync), **given)
    kinds = {"rpc": RPCDataCollector, "distributed": DistributedDataCollector}
    anywhere = kinds.get(backend) or load("collector of ray")
    return anywhere(*args, sync=bool(sync), **given)


class MultiCollector:
    """TorchRL's name for :class:`MultiSyncDataCollector` and :class:`MultiaSyncDataCollector`."""

    def __new__(cls, *args: Any, sync: bool, **kwargs: Any) -> Any:
        """Make the collector that ``sync`` selects; it takes the same arguments."""
        return (MultiSyncDataCollector if sync else MultiaSyncDataCollector)(*args, **kwargs)
