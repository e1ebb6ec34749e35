"""The handle that users get of a publication: it knows the workers that have received it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from distcollect.common import checks
from distcollect.common.signals import Wakeup
from distcollect.errors import DistCollectError, WeightsTimeout


class PushHandle:
    """A version on its way to workers.

    Attributes:
        version: the policy_version that is being sent.
        worker_ids: the workers that it is sent to; in place of those that an inference server
            serves, the server: 1048576 plus its number.
        timings: how long the push took, in seconds; empty before it was sent: "ready_s" until the
            workers were ready, "transfer_s" for the weights, "acknowledge_s" until the last had
            acknowledged, "total_s" since the publication. Stays empty if a newer version was sent
            in its place.
        num_bytes: size of what was sent to each worker; 0 if a newer version was sent in its place.
    """

    def __init__(self, version: int, worker_ids: Sequence[int], timeout_s: float) -> None:
        self.version = version
        self.worker_ids = tuple(worker_ids)
        self.timings: dict[str, float] = {}
        self.num_bytes = 0
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._changed = Wakeup()
        self._outcomes: dict[int, int | DistCollectError] = {}  # what was acknowledged, or why not
        self._later: set[int] = set()  # left out for now

    def __repr__(self) -> str:
        parts = {
            "acknowledged by": sorted(self.acknowledged),
            "left out": sorted(self.left_out),
            "no answer yet from": self._open(),
        }
        told = "; ".join(f"{what} {workers}" for what, workers in parts.items() if workers)
        return f"<PushHandle: version {self.version}; workers: {told or 'none'}>"

    @property
    def acknowledged(self) -> dict[int, int]:
        """Workers that have it: worker_id to the acknowledged version, this one or a newer one."""
        with self._lock:
            return {w: version for w, version in self._outcomes.items() if isinstance(version, int)}

    @property
    def left_out(self) -> dict[int, DistCollectError]:
        """Workers that don't have it: worker_id to the error that says why.

        A worker that was merely late, or is being replaced, disappears from here once it has it.
        """
        with self._lock:
            return {w: error for w, error in self._outcomes.items() if not isinstance(error, int)}

    def done(self) -> bool:
        """Return True if each worker has these weights or is left out."""
        return not self._open()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until each worker has these weights or is left out.

        While all workers are late or being replaced, it keeps waiting for one of them.

        Args:
            timeout_s: seconds; None: ``WeightSync.ready_timeout_s`` plus twice
                ``Faults.weights_timeout_s``.

        Raises:
            ArgumentError, ArgumentTypeError: ``timeout_s`` is no number above 0.
            WeightsTimeout: some workers have not answered at the deadline, or no worker has the
                weights; names the workers.
            WorkerError: no worker could receive the weights; WorkerLost if they are gone.
        """
        limit = self._timeout_s
        if timeout_s is not None:
            limit = checks.seconds(f"timeout_s={timeout_s!r}", timeout_s)
        if not self._changed.wait_until(lambda: not self._waited_for(), limit):
            raise WeightsTimeout(
                f"version {self.version} is not acknowledged by workers {self._waited_for()} "
                f"after {limit:g} s; Faults(weights_timeout_s=...) gives them longer"
            )
        left_out = self.left_out
        if self.worker_ids and not self.acknowledged and left_out:
            # Without the frames of an earlier raise, which its traceback keeps alive.
            raise next(iter(left_out.values())).with_traceback(None)

    def _waited_for(self) -> list[int]:
        """The workers of which nothing is known yet; else those that get it, if none has it yet."""
        with self._lock:
            return self._open() or ([] if self.acknowledged else sorted(self._later))

    def _open(self) -> list[int]:
        """The workers of which nothing is known yet."""
        with self._lock:
            return [w for w in self.worker_ids if w not in self._outcomes]

    def settle(
        self, worker_id: int, outcome: int | DistCollectError, *, for_now: bool = False
    ) -> None:
        """Record the version that a worker acknowledged, or why it is left out.

        ``for_now``: the worker, or the process that replaces it, is to get it later.
        """
        with self._lock:
            if isinstance(outcome, int) or not isinstance(self._outcomes.get(worker_id), int):
                self._outcomes[worker_id] = outcome
                (self._later.add if for_now else self._later.discard)(worker_id)
        self._changed.ring()
