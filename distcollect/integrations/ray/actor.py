"""What runs in an actor of Ray: the supervisor of one worker. Ray itself is not imported here."""

from __future__ import annotations

from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.supervisor import supervise
from distcollect.net.messages import TrainerAddress

_JOIN_TIMEOUT_S = 300.0
# Ray ends an actor whose owner is gone, so an actor that still runs has a trainer to look for.
_PATIENCE_S = 3600.0


class RayWorker:
    """An actor that starts and watches the processes of one worker.

    Ray's dashboard shows the name of this class.
    """

    def serve(self, worker_id: int, trainer: TrainerAddress, num_threads: int) -> None:
        """Serve the trainer until it needs this worker no more.

        Args:
            worker_id: the worker's slot.
            trainer: where to join.
            num_threads: that torch uses in the worker, unless OMP_NUM_THREADS is set.

        Raises:
            LaunchError: the trainer can't be reached, or it refused.
            SystemExit: this process was asked to end.
        """
        supervise(
            lambda: trainer,
            rank=worker_id + 1,
            placement=CpuPlacement(None, num_threads),
            timeout_s=_JOIN_TIMEOUT_S,
            patience_s=_PATIENCE_S,
            name=f"worker {worker_id}",
        )
