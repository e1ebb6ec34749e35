"""What runs in an actor of Ray: the supervisor of one worker. Ray itself is not imported here."""

from __future__ import annotations

from distcollect.errors import LaunchError
from distcollect.launch.cpu_placement import CpuPlacement
from distcollect.launch.supervisor import supervise
from distcollect.net.messages import TrainerAddress
from distcollect.version import __version__

_JOIN_TIMEOUT_S = 300.0
# Ray ends an actor whose owner is gone, so an actor that still runs has a trainer to look for.
_PATIENCE_S = 3600.0


class RayWorker:
    """An actor that starts and watches the processes of one worker.

    Ray's dashboard shows the name of this class.
    """

    def serve(
        self, *, worker_id: int, host: str, port: int, token: str, version: str, num_threads: int
    ) -> None:
        """Serve the trainer until it needs this worker no more.

        All arguments are plain, so that an actor with another version of this package can read
        them too.

        Args:
            worker_id: the worker's slot.
            host: where the trainer listens.
            port: the same.
            token: of the run.
            version: of the trainer's distcollect.
            num_threads: that torch uses in the worker, unless OMP_NUM_THREADS is set.

        Raises:
            LaunchError: the trainer can't be reached, or it refused, or the versions differ.
            SystemExit: this process was asked to end.
        """
        if version != __version__:
            raise LaunchError(
                f"the trainer has distcollect {version}, and the host of worker {worker_id} has "
                f"{__version__}: install the same version on all nodes of the Ray cluster, or have "
                "Ray install it by a runtime_env"
            )
        trainer = TrainerAddress(host, port, token)
        supervise(
            lambda: trainer,
            rank=worker_id + 1,
            placement=CpuPlacement(None, num_threads),
            timeout_s=_JOIN_TIMEOUT_S,
            patience_s=_PATIENCE_S,
            name=f"worker {worker_id}",
        )
