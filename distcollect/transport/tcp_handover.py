"""The connection by which a trainer takes rollouts over from a worker of another trainer.

The worker listens for it, see :class:`~distcollect.worker.other_trainers.OtherTrainers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from distcollect.common.threads import run_aside
from distcollect.errors import LaunchError
from distcollect.net.client import ANSWER_TIMEOUT_S, ControlConnection, join
from distcollect.net.framing import Packet, PacketReceiver
from distcollect.net.messages import Hello, TrainerAddress

log = logging.getLogger(__name__)

_NAME = "this trainer, which takes a rollout over from a worker of another one,"


class OthersWorker:
    """A connection with a worker of another trainer, which is served by a thread of its own."""

    def __init__(self, endpoint: str, token: str) -> None:
        """``endpoint``: where the worker listens."""
        host, _, port = endpoint.rpartition(":")
        self._where = TrainerAddress(host, int(port), token)
        self._joined: Future[ControlConnection] = Future()
        self._is_over = False

    def carry(self, packets: PacketReceiver | None) -> None:
        """Connect, and have ``packets`` get what is answered; None: end the connection."""
        if packets is None:
            self._when_joined(ControlConnection.end)
        else:
            run_aside(self._serve, packets)

    def send_packet(self, packet: Packet) -> None:
        """Send a packet as soon as there is a connection.

        Raises:
            OSError: the worker is gone, or can't be reached.
        """
        if self._is_over:
            raise OSError(f"the connection to {self._where} has ended")
        self._when_joined(lambda connection: connection.send_packet(packet))

    def _when_joined(self, work: Callable[[ControlConnection], object]) -> None:
        self._joined.add_done_callback(lambda done: done.exception() or work(done.result()))

    def _serve(self, packets: PacketReceiver) -> None:
        try:
            connection, _ = join(
                lambda: self._where, Hello(), ANSWER_TIMEOUT_S, name=_NAME, give_up_if_refused=True
            )
        except LaunchError as error:
            log.warning("%s", error)
            self._joined.set_exception(error)
        else:
            connection.carry(packets)
            self._joined.set_result(connection)
            try:
                while connection.receive() is not None:
                    pass
            except Exception:  # also where there is no memory for what comes
                log.exception("what a worker of another trainer sent is unusable")
            connection.close()
        self._is_over = True  # first, so that no question that is sent from now on is owed
        packets.ended()
