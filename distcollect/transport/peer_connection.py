"""The connection of a process with another one of its run that is not its trainer.

A trainer takes rollouts over by it, and a worker asks an inference server on another host. The
other side is a :class:`~distcollect.worker.peer_listener.PeerListener`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from distcollect.common.threads import run_aside
from distcollect.errors import LaunchError
from distcollect.net.client import ANSWER_TIMEOUT_S, ControlConnection, join
from distcollect.net.framing import Packet, PacketReceiver
from distcollect.net.messages import Hello, TrainerAddress

log = logging.getLogger(__name__)


class PeerConnection:
    """A connection with a process that listens, which is served by a thread of its own."""

    def __init__(
        self, endpoint: str, token: str, name: str, log_level: int = logging.WARNING
    ) -> None:
        """Connect in :meth:`carry`.

        Args:
            endpoint: where the other process listens.
            token: that both have to know.
            name: what to call this process if it can't connect.
            log_level: of the line that says so.
        """
        self._log_level, self._endpoint = log_level, endpoint
        host, _, port = endpoint.rpartition(":")
        where = TrainerAddress(host, int(port), token)
        self._join = partial(join, lambda: where, Hello(), ANSWER_TIMEOUT_S, name=name)
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
            OSError: it is gone, or can't be reached.
        """
        if self._is_over:
            raise OSError(f"the connection to {self._endpoint} has ended")
        self._when_joined(lambda connection: connection.send_packet(packet))

    def _when_joined(self, work: Callable[[ControlConnection], object]) -> None:
        self._joined.add_done_callback(lambda done: done.exception() or work(done.result()))

    def _serve(self, packets: PacketReceiver) -> None:
        try:
            connection, _ = self._join(give_up_if_refused=True)
        except LaunchError as error:
            log.log(self._log_level, "%s", error)
            self._joined.set_exception(error)
        else:
            connection.carry(packets)
            self._joined.set_result(connection)
            try:
                while connection.receive() is not None:
                    pass
            except Exception:  # also where there is no memory for what comes
                log.exception("what %s sent is unusable", self._endpoint)
            connection.close()
        self._is_over = True  # first, so that no question that is sent from now on is owed
        packets.ended()
