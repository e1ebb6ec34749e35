"""The joining side of a control connection."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from distcollect.errors import LaunchError
from distcollect.net.framing import FrameReader, configure_socket
from distcollect.net.messages import Hello, Message, Refused, decode, encode

log = logging.getLogger(__name__)


class NoAnswer(LaunchError):
    """The connection broke off during the handshake; another try may succeed."""


class ControlConnection:
    """A worker's or supervisor's end of the connection to its trainer. Reads block.

    Attributes:
        welcome: the trainer's answer to :meth:`join`; None before.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Connect.

        Raises:
            OSError: nobody listens there, or no answer within ``timeout_s``.
        """
        self._host, self._port = host, port
        self._sock = socket.create_connection((host, port), timeout=timeout_s)
        configure_socket(self._sock)
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self.welcome: Message | None = None

    @property
    def local_address(self) -> str:
        """This host's address on the route to the trainer."""
        return str(self._sock.getsockname()[0])

    def join(self, hello: Hello) -> Message:
        """Introduce this process; returns the trainer's welcome.

        Raises:
            NoAnswer: the connection broke off, or there was no answer in time.
            LaunchError: the trainer refused, and says why; or it is no trainer.
        """
        self.send(hello)
        try:
            answer = self.receive()
        except LaunchError as error:
            raise LaunchError(
                f"what listens at {self._host}:{self._port} is no trainer of distcollect's "
                f"({error}): check the address"
            ) from error
        if answer is None:
            raise NoAnswer("it accepted the connection, but did not answer the join handshake")
        if isinstance(answer, Refused):
            raise LaunchError(f"the trainer refused this {hello.role}: {answer.reason}")
        self._sock.settimeout(None)
        self.welcome = answer
        return answer

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the trainer is gone (:meth:`receive` reports that)."""
        with self._lock:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                log.debug("could not send %s to the trainer", type(message).__name__)

    def receive(self) -> Message | None:
        """The next message, None once the trainer is gone or can't be reached any more.

        Raises:
            LaunchError: what arrived is no message of ours.
        """
        while True:
            frame = self._reader.next()
            if frame is not None:
                return decode(frame)
            try:
                data = self._sock.recv(65536)
            except OSError:  # a TimeoutError may be the kernel's: the host can't be reached
                return None
            if not data:
                return None
            self._reader.feed(data)

    def close(self) -> None:
        """Close it; the trainer sees this process as gone."""
        self._sock.close()


def exit_now(code: int) -> NoReturn:
    """End this process and all that it started, without waiting for anything.

    Only for a process that leads its own process group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)
