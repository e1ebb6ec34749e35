"""Has Ray start the supervisors: one actor for each worker."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from distcollect.common.forks import Owner
from distcollect.common.refusing import refusing
from distcollect.common.waiting import Reminder
from distcollect.errors import LaunchError
from distcollect.integrations.ray import cluster as ray_cluster
from distcollect.integrations.ray.actor import RayWorker
from distcollect.integrations.ray.cluster import words
from distcollect.integrations.ray.settings import RaySettings
from distcollect.net.messages import TrainerAddress

log = logging.getLogger(__name__)

# Actors that Ray can place at once are placed within a second of each other, and join within a few
# more. Those that come later wait for resources.
_SETTLED_S = 10.0
# For supervisors to end once they were told to, and for Ray to confirm that an actor has ended.
_END_TIMEOUT_S = 5.0
_WATCH_PERIOD_S = 1.0
_DISCONNECTED = (
    "this process is no longer connected to Ray, which has ended its actors: close the collector "
    "before you call ray.shutdown()"
)


class _Placed(NamedTuple):
    """A slot's actor.

    Attributes:
        actor: Ray's handle.
        started: Ray's reference to the actor's first sign of life.
        served: Ray's reference to the end of :meth:`.RayWorker.serve`.
    """

    actor: Any
    started: Any
    served: Any


class RayPlacer:
    """The actors of one collector's workers.

    Ray restarts an actor whose process or node is lost, and calls it again. So the supervisor in it
    joins again, in the same slot.

    Attributes:
        address: this host's address in the Ray cluster.
    """

    _give_up_slot: Callable[[int, str], None]

    def __init__(self, settings: RaySettings) -> None:
        """Connect to Ray.

        Raises:
            ArgumentError: Ray has no such options of actors.
            LaunchError: Ray is not installed, or can't be reached.
        """
        self._settings = settings
        self._check_options(ray_cluster.load_ray())
        self._ray = ray_cluster.connect(settings.init_config)
        self._connection = ray_cluster.connection(self._ray)
        self.address = str(self._ray.util.get_node_ip_address())
        self._owner = Owner()
        self._supervised: Callable[[], Collection[int]] = tuple
        self._lock = threading.Lock()  # of what follows
        self._slots: list[_Placed] = []
        self._given_up: set[int] = set()
        self._last_absent: list[int] = []
        self._changed_at = math.inf
        self._placement_group: Any = None
        self._closed = threading.Event()

    def _check_options(self, ray: Any) -> None:
        problem = f"Ray refuses remote_configs={self._settings.worker_options!r}"
        with refusing(problem, "use options of ray.remote", (TypeError, ValueError)):
            for options in self._settings.all_options:
                ray.remote(RayWorker).options(**options)

    def start(
        self,
        trainer: TrainerAddress,
        num_workers: int,
        supervised: Callable[[], Collection[int]],
        give_up: Callable[[int, str], None],
    ) -> None:
        """Create the actors; see :class:`~.worker_hosts.Placer`."""
        self._supervised, self._give_up_slot = supervised, give_up
        name = f"distcollect-{secrets.token_hex(3)}-worker"
        log.info("asking Ray for %d actor(s), named %s-0 and so on", num_workers, name)
        try:
            groups = self._group_options(name, num_workers)
            for worker_id in range(num_workers):
                options = {**self._settings.options(worker_id), **groups[worker_id]}
                self._create(worker_id, {**options, "name": f"{name}-{worker_id}"}, trainer)
        except (TypeError, ValueError, self._ray.exceptions.RayError) as error:
            raise LaunchError(f"Ray could not create the workers' actors: {error}") from error
        threading.Thread(target=self._watch, name="distcollect-ray", daemon=True).start()

    def _create(self, worker_id: int, options: dict[str, Any], trainer: TrainerAddress) -> None:
        # With endless retries Ray calls `serve` again whenever it has restarted the actor.
        options["max_task_retries"] = -1 if options["max_restarts"] else 0
        actor = self._ray.remote(RayWorker).options(**options).remote()
        started = actor.__ray_ready__.remote()
        num_threads = max(1, int(options["num_cpus"] or 1))
        # An argument of a call goes directly to the actor; those of its creation would be stored.
        served = actor.serve.remote(worker_id, trainer, num_threads)
        self._slots.append(_Placed(actor, started, served))
        served.future().add_done_callback(partial(self._ended, worker_id))

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

    # Called by Ray, on a thread of its own.

    def _ended(self, worker_id: int, served: Any) -> None:
        if not self._closed.is_set():
            self._give_up(worker_id, _reason(worker_id, served.exception()))

    def _give_up(self, worker_id: int, reason: str) -> None:
        with self._lock:
            if worker_id in self._given_up:
                return
            self._given_up.add(worker_id)
        self._give_up_slot(worker_id, reason)

    def _absent(self) -> list[int]:
        """The slots that await their supervisor: it has not joined, or is gone."""
        joined = set(self._supervised())
        with self._lock:
            absent = sorted(set(range(len(self._slots))) - joined - self._given_up)
            if absent != self._last_absent:
                self._last_absent, self._changed_at = absent, time.monotonic()
            return absent

    def _ever_started(self, worker_ids: Sequence[int]) -> list[int]:
        """Those of these slots whose actor Ray has started once at least."""
        slots = {self._slots[worker_id].started: worker_id for worker_id in worker_ids}
        started, _ = self._ray.wait(list(slots), num_returns=len(slots), timeout=0)
        return [slots[reference] for reference in started]

    @property
    def is_settled(self) -> bool:
        """See :class:`~.worker_hosts.Placer`."""
        return not self._absent() or time.monotonic() - self._changed_at >= _SETTLED_S

    def missing(self) -> str:
        """See :class:`~.worker_hosts.Placer`."""
        if not (absent := self._absent()):
            return ""
        started = self._ever_started(absent)
        waiting = [worker_id for worker_id in absent if worker_id not in started]
        parts = []
        if started:
            parts.append(f"Ray has started workers {started}, which did not join yet")
        if waiting:
            wanted = self._settings.resources(waiting[0])
            available = self._ray.available_resources()
            free = words({name: available.get(name, 0.0) for name in wanted})
            strategy = self._settings.strategy
            together = "" if strategy is None else f", all at the same time, as {strategy} asks"
            parts.append(
                f"Ray has not started workers {waiting} yet ({words(wanted)} wanted for each"
                f"{together}; free on all {len(ray_cluster.nodes(self._ray))} node(s): {free}): "
                "they wait for that, or have it and their actors are starting; `ray status` shows "
                "what is in use, and the largest node"
            )
        return "; ".join(parts)

    def _watch(self) -> None:
        """Say from time to time which workers are missing; give all up when Ray is gone."""
        reminder = Reminder(0.0)
        while not self._closed.wait(_WATCH_PERIOD_S):
            if not self._ray.is_initialized():
                for worker_id in range(len(self._slots)):
                    self._give_up(worker_id, _DISCONNECTED)
                return
            self._absent()
            if reminder.began != self._changed_at:
                reminder = Reminder(self._changed_at)
            if not reminder.is_due(now := time.monotonic()):
                continue
            try:
                if missing := self.missing():
                    log.warning("after %.0f s: %s", now - reminder.began, missing)
            except self._ray.exceptions.RayError as error:
                log.warning("Ray does not answer: %s", error)

    def close(self) -> None:
        """Kill the actors, wait until they have ended, and release the connection to Ray."""
        if not self._owner.is_here or self._closed.is_set():
            return
        self._closed.set()
        try:
            # Otherwise the connection to Ray was closed before, which has killed them. A call would
            # connect anew, or ask another cluster.
            if ray_cluster.connection(self._ray) == self._connection:
                self._kill()
        except self._ray.exceptions.RayError as error:
            log.warning("Ray does not answer, and ends its actors by itself: %s", error)
        finally:
            ray_cluster.release()

    def _kill(self) -> None:
        ray, slots = self._ray, self._slots
        ends = [slots[worker_id].served for worker_id in self._ever_started(range(len(slots)))]
        ray.wait(ends, num_returns=len(ends), timeout=_END_TIMEOUT_S)
        for slot in slots:
            ray.kill(slot.actor)
        # A call to an actor fails once it has ended, and its resources are free for others.
        ended = [slot.actor.__ray_ready__.options(max_task_retries=0).remote() for slot in slots]
        ray.wait(ended, num_returns=len(ended), timeout=_END_TIMEOUT_S)
        if self._placement_group is not None:
            ray.util.remove_placement_group(self._placement_group)


def _reason(worker_id: int, error: BaseException | None) -> str:
    """Return why Ray doesn't start a worker's supervisor any more, in words."""
    if error is None:
        return f"the actor of worker {worker_id} has ended by itself"
    cause = getattr(error, "cause", None)
    if isinstance(cause, LaunchError):
        return str(cause)
    return f"Ray has given up the actor of worker {worker_id}: {str(error).strip()}"
