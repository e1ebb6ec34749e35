"""The joining side of a control connection."""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from distcollect.errors import LaunchError
from distcollect.net.framing import (
    Decoder,
    Message,
    configure_socket,
    encode,
    versions,
)
from distcollect.net.server import log


class NoAnswer(LaunchError):
    """The handshake broke off, as the network did: that may get better."""


class ControlConnection:
    """A worker's or supervisor's end of the connection. Reads block.

    Attributes:
        welcome: the trainer's answer to :meth:`join`; empty before.
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
        self._decoder = Decoder()
        self.welcome: Message = {}

    @property
    def local_address(self) -> str:
        """This host's address on the route to the trainer."""
        return str(self._sock.getsockname()[0])

    def join(self, role: str, token: str, **about: Any) -> Message:
        """Introduce this process; the trainer's welcome.

        Raises:
            NoAnswer: the connection broke off, or there was no answer in time.
            LaunchError: it refused; says why.
        """
        self.send(
            {
                "role": role,
                "token": token,
                "versions": versions(),
                "host": platform.node(),
                "pid": os.getpid(),
                **about,
            }
        )
        try:
            answer = self.receive()
        except LaunchError as error:
            raise LaunchError(
                f"what listens at {self._host}:{self._port} is no trainer of distcollect's "
                f"({error}): check the address"
            ) from error
        if answer is None:
            raise NoAnswer("it took the connection, but did not answer the join handshake")
        if "refused" in answer:
            raise LaunchError(f"the trainer refused this {role}: {answer['refused']}")
        self._sock.settimeout(None)
        self.welcome = answer
        return answer

    def send(self, message: Message) -> None:
        """Send one frame; silently nothing if the trainer is gone (reading will tell)."""
        with self._lock:
            try:
                self._sock.sendall(encode(message))
            except OSError:
                log.debug("lifeline: could not send %s", message.keys())

    def receive(self) -> Message | None:
        """The next frame, None once the trainer is gone or can't be reached any more."""
        while True:
            message = self._decoder.next()
            if message is not None:
                return message
            try:
                data = self._sock.recv(65536)
            except OSError:  # a TimeoutError is the kernel's, too: the host can't be reached
                return None
            if not data:
                return None
            self._decoder.feed(data)

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
