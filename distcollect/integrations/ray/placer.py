"""Has Ray start the supervisors: one actor for each worker."""

from __future__ import annotations

import enum
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distcollect.common.forks import Owner
from distcollect.common.waiting import Reminder
from distcollect.errors import LaunchError
from distcollect.integrations.ray import cluster as ray_cluster
from distcollect.integrations.ray.actor import RayWorker
from distcollect.integrations.ray.cluster import fits, words
from distcollect.integrations.ray.settings import RaySettings
from distcollect.net.messages import TrainerAddress
from distcollect.version import __version__

log = logging.getLogger(__name__)

# Actors that Ray can place at once are placed within a second of each other, and join within a few
# more. Those that come later wait for resources.
_SETTLED_S = 10.0
# For supervisors to end once they were told to, and for Ray to confirm that an actor has ended.
_END_TIMEOUT_S = 5.0
_MAX_NAMED = 5


class _State(enum.Enum):
    """How far the supervisor of a slot is."""

    WAITING = enum.auto()  # Ray has not started its actor, or starts it again
    STARTED = enum.auto()  # its actor runs
    JOINED = enum.auto()  # it has joined the trainer
    GIVEN_UP = enum.auto()  # Ray doesn't start it any more, whatever is reported after this


_PENDING = frozenset({_State.WAITING, _State.STARTED})


@dataclass(eq=False)
class _Placed:
    """A slot's actor.

    Attributes:
        actor: Ray's handle.
        served: Ray's reference to the end of :meth:`.RayWorker.serve`.
        state: see :class:`_State`.
    """

    actor: Any
    served: Any
    state: _State = _State.WAITING


class RayPlacer:
    """The actors of one collector's workers.

    Ray restarts an actor whose process or node is lost, and calls it again. So the supervisor in it
    joins again, in the same slot.

    Attributes:
        address: this host's address in the Ray cluster.
    """

    def __init__(self, settings: RaySettings) -> None:
        """Connect to Ray.

        Raises:
            LaunchError: Ray is not installed, or can't be reached.
        """
        self._settings = settings
        self._ray = ray_cluster.connect(settings.init_config)
        self._connection = ray_cluster.connection(self._ray)
        self.address = str(self._ray.util.get_node_ip_address())
        self._owner = Owner()
        self._changed = threading.Condition()
        self._slots: list[_Placed] = []
        self._placement_group: Any = None
        self._changed_at = math.inf
        self._is_closed = False

    def start(
        self, trainer: TrainerAddress, num_workers: int, given_up: Callable[[int, str], None]
    ) -> None:
        """Create the actors; see :class:`~.placement.Placer`."""
        name = f"distcollect-{secrets.token_hex(3)}-worker"
        log.info("asking Ray for %d actor(s), named %s-0 and so on", num_workers, name)
        if too_much := self._too_much(range(num_workers), num_workers):
            log.warning("%s", too_much)
        try:
            groups = self._group_options(name, num_workers)
            for worker_id in range(num_workers):
                options = {**self._settings.options(worker_id), **groups[worker_id]}
                self._create(worker_id, f"{name}-{worker_id}", options, trainer, given_up)
        except (TypeError, ValueError, self._ray.exceptions.RayError) as error:
            raise LaunchError(
                f"Ray refuses remote_configs={self._settings.worker_options!r}: {error}"
            ) from error
        threading.Thread(target=self._remind, name="distcollect-ray", daemon=True).start()

    def _create(
        self,
        worker_id: int,
        name: str,
        options: dict[str, Any],
        trainer: TrainerAddress,
        given_up: Callable[[int, str], None],
    ) -> None:
        # With endless retries Ray calls `serve` again whenever it has restarted the actor.
        options = {
            **options,
            "name": name,
            "max_task_retries": -1 if options["max_restarts"] else 0,
        }
        num_threads = max(1, int(options["num_cpus"] or 1))
        actor = self._ray.remote(RayWorker).options(**options).remote()
        started = actor.__ray_ready__.remote()
        # An argument of a call goes directly to the actor; those of its creation would be stored.
        served = actor.serve.remote(
            worker_id=worker_id,
            host=trainer.host,
            port=trainer.port,
            token=trainer.token,
            version=__version__,
            num_threads=num_threads,
        )
        with self._changed:
            self._slots.append(_Placed(actor, served))
            self._changed_at = time.monotonic()
        started.future().add_done_callback(partial(self._started, worker_id))
        served.future().add_done_callback(partial(self._ended, worker_id, given_up))

    def _group_options(self, name: str, num_workers: int) -> Sequence[dict[str, Any]]:
        """The options that put each actor into its part of the placement group, if there is one."""
        strategy = self._settings.strategy
        if strategy is None:
            return [{}] * num_workers
        bundles = [self._settings.resources(i) or {"CPU": 0.001} for i in range(num_workers)]
        util = self._ray.util
        group = self._placement_group = util.placement_group(bundles, strategy, name=name)
        part = partial(util.scheduling_strategies.PlacementGroupSchedulingStrategy, group)
        return [{"scheduling_strategy": part(i)} for i in range(num_workers)]

    def _too_much(self, worker_ids: Sequence[int], num_workers: int) -> str:
        """Return why the cluster, with the nodes of now, can never start these actors, in words."""
        nodes = [node["Resources"] for node in ray_cluster.nodes(self._ray)]
        resources = [self._settings.resources(w) for w in range(num_workers)]
        large = [w for w in worker_ids if not any(fits(resources[w], node) for node in nodes)]
        if large:
            wanted = resources[large[0]]
            most = {name: max((n.get(name, 0.0) for n in nodes), default=0.0) for name in wanted}
            return (
                f"no node of the Ray cluster has the {words(wanted)} wanted for {_names(large)} "
                f"(the most that one has: {words(most)}): Ray can't start them until a larger node "
                "is added"
            )
        strategy = self._settings.strategy
        group = f"placement_group_strategy={strategy!r} puts"
        if strategy == "STRICT_SPREAD" and len(nodes) < num_workers:
            return (
                f"{group} each of the {num_workers} workers on a node of its own, and the Ray "
                f"cluster has {len(nodes)}: Ray can't start them until nodes are added; 'SPREAD' "
                "needs no more nodes"
            )
        together: Counter[str] = Counter()
        for each in resources:
            together.update(each)
        if strategy == "STRICT_PACK" and not any(fits(together, node) for node in nodes):
            return (
                f"{group} all workers on one node, and no node of the Ray cluster has the "
                f"{words(together)} that they need together: Ray can't start them until a larger "
                "node is added; 'PACK' needs no such node"
            )
        return ""

    # Called by Ray, on a thread of its own.

    def _started(self, worker_id: int, started: Any) -> None:
        with self._changed:
            if started.exception() is None and self._slots[worker_id].state is _State.WAITING:
                self._enter(worker_id, _State.STARTED)

    def _ended(self, worker_id: int, given_up: Callable[[int, str], None], served: Any) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._enter(worker_id, _State.GIVEN_UP)
        given_up(worker_id, _reason(worker_id, served.exception()))

    # What the trainer's join server sees.

    def joined(self, worker_id: int) -> None:
        """See :class:`~.placement.Placer`."""
        self._enter(worker_id, _State.JOINED)

    def left(self, worker_id: int) -> None:
        """See :class:`~.placement.Placer`."""
        self._enter(worker_id, _State.WAITING)

    def _enter(self, worker_id: int, state: _State) -> None:
        with self._changed:
            # Others have joined by themselves.
            if worker_id < len(self._slots):
                slot = self._slots[worker_id]
                slot.state = state if slot.state is not _State.GIVEN_UP else _State.GIVEN_UP
                self._changed_at = time.monotonic()
                self._changed.notify_all()

    @property
    def is_settled(self) -> bool:
        """See :class:`~.placement.Placer`."""
        with self._changed:
            states = {slot.state for slot in self._slots}
            if _State.STARTED in states:
                return False
            is_missing = _State.WAITING in states
            return not is_missing or time.monotonic() - self._changed_at >= _SETTLED_S

    def _missing(self) -> dict[int, _State]:
        """The states of the slots whose supervisors have not joined, and may still do so."""
        return {w: slot.state for w, slot in enumerate(self._slots) if slot.state in _PENDING}

    def missing(self) -> str:
        """See :class:`~.placement.Placer`."""
        with self._changed:
            states = self._missing()
        joining = [w for w, state in states.items() if state is _State.STARTED]
        waiting = [w for w, state in states.items() if state is _State.WAITING]
        parts = []
        if joining:
            parts.append(f"Ray has started {_names(joining)}, which did not join yet")
        if waiting:
            wanted = words(self._settings.resources(waiting[0]))
            available = self._ray.available_resources()
            free = words({n: available.get(n, 0.0) for n in self._settings.resources(waiting[0])})
            together = ""
            if self._settings.strategy is not None:
                together = f", all at the same time, as {self._settings.strategy} asks"
            parts.append(
                f"Ray has not started {_names(waiting)} yet ({wanted} wanted for each{together}; "
                f"free in the whole cluster: {free}); `ray status` shows what is in use"
            )
            parts += filter(None, [self._too_much(waiting, len(self._slots))])
        return "; ".join(parts)

    def _remind(self) -> None:
        """Say from time to time which workers are missing, until the end."""
        while self._wait(lambda: bool(self._missing())):
            reminder = Reminder(time.monotonic())
            while not self._wait(lambda: not self._missing(), reminder.at - time.monotonic()):
                now = time.monotonic()
                if self._is_closed:
                    return
                if reminder.is_due(now):
                    self._report(now - reminder.began)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for this or for the end; False if neither came, or the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or is_done(), timeout_s)
            return not self._is_closed and is_done()

    def _report(self, elapsed_s: float) -> None:
        # Ray is asked without the lock, which Ray's own thread needs to report.
        try:
            if missing := self.missing():
                log.warning("after %.0f s: %s", elapsed_s, missing)
        except self._ray.exceptions.RayError as error:
            log.warning("Ray does not answer: %s", error)

    def close(self) -> None:
        """Kill the actors, wait until they have ended, and release the connection to Ray."""
        if not self._owner.is_here:
            return
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
            slots = list(self._slots)
        try:
            # Otherwise the connection to Ray was closed before, which has killed them. A call would
            # connect anew, or ask another cluster.
            if ray_cluster.connection(self._ray) == self._connection:
                self._kill(slots)
        except self._ray.exceptions.RayError as error:
            log.warning("Ray does not answer, and ends its actors by itself: %s", error)
        finally:
            ray_cluster.release()

    def _kill(self, slots: Sequence[_Placed]) -> None:
        ray = self._ray
        started = [slot.served for slot in slots if slot.state is not _State.WAITING]
        if started:
            ray.wait(started, num_returns=len(started), timeout=_END_TIMEOUT_S)
        for slot in slots:
            ray.kill(slot.actor)
        # A call to an actor fails once it has ended, and its resources are free for others.
        ended = [slot.actor.__ray_ready__.options(max_task_retries=0).remote() for slot in slots]
        if ended:
            ray.wait(ended, num_returns=len(ended), timeout=_END_TIMEOUT_S)
        if self._placement_group is not None:
            ray.util.remove_placement_group(self._placement_group)


def _names(worker_ids: Sequence[int]) -> str:
    names = [f"worker {worker_id}" for worker_id in worker_ids[:_MAX_NAMED]]
    if len(worker_ids) > _MAX_NAMED:
        names.append(f"{len(worker_ids) - _MAX_NAMED} more")
    return ", ".join(names)


def _reason(worker_id: int, error: BaseException | None) -> str:
    """Return why Ray doesn't start a worker's supervisor any more, in words."""
    if error is None:
        return f"the actor of worker {worker_id} has ended by itself"
    cause = getattr(error, "cause", None)
    if isinstance(cause, LaunchError):
        return str(cause)
    text = str(error).strip()
    if "No module named 'distcollect" in text:
        text += (
            "\nInstall distcollect, with the trainer's versions of Python and torch, on all nodes "
            "of the Ray cluster, or have Ray install it by a runtime_env"
        )
    return f"Ray has given up the actor of worker {worker_id}: {text}"
