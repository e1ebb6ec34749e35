"""The joining side of a control connection."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from distcollect.errors import LaunchError
from distcollect.net import tls
from distcollect.net.framing import (
    MAX_FRAME,
    FrameReader,
    Outbox,
    Packet,
    PacketReceiver,
    configure_socket,
    open_sockets,
    with_length,
)
from distcollect.net.handshake import JoiningSide, NotProven, StartTls, printable
from distcollect.net.messages import (
    Hello,
    Message,
    Refused,
    TrainerAddress,
    decode,
    encode,
    to_bytes,
)

log = logging.getLogger(__name__)

# What a listener that has not proven to be the trainer may send at once.
_MAX_UNPROVEN_FRAME = 4096
# For the whole handshake: longer than the trainer waits for its own part.
ANSWER_TIMEOUT_S = 15.0
# The pause between two tries grows: hundreds of supervisors may wait for hours.
_CONNECT_TIMEOUT_S, _RETRY_S, _LONGEST_RETRY_S = 5.0, 0.2, 2.0
_SAY_AFTER_S = 5.0  # that a process still waits, and why
_MAX_UNSENT = 8 * MAX_FRAME
_WAKEUP_BYTES = 4096


class _Refusal(LaunchError):
    """The trainer refused this process."""


class ControlConnection:
    """A worker's or supervisor's end of the connection to its trainer. Reads block.

    Attributes:
        sock: its socket.
        local_address: this host's address on the route to the trainer.
        welcome: the trainer's answer to :meth:`join`; None before.
    """

    def __init__(self, host: str, port: int, timeout_s: float, *, fd: int = -1) -> None:
        """Connect to ``host``; ``fd``: use this socket, which is connected to it already.

        Raises:
            OSError: nobody listens there, or no answer within ``timeout_s``.
        """
        self._where = f"what listens at {host}:{port}"
        self._is_inherited = fd >= 0
        self.sock: Any
        if self._is_inherited:
            self.sock = socket.socket(fileno=fd)
            self.sock.set_inheritable(False)
            self.local_address = host  # the process that made it is on this host
        else:
            self.sock = socket.create_connection((host, port), timeout=timeout_s)
            self.local_address = str(self.sock.getsockname()[0])
        configure_socket(self.sock)
        self._outbox = Outbox(self.sock, MAX_FRAME)
        self._reader = FrameReader(_MAX_UNPROVEN_FRAME)
        self._packets: PacketReceiver | None = None
        self._selector: selectors.BaseSelector | None = None
        self._soon: deque[Message] = deque()
        self.welcome: Message | None = None

    def carry(self, packets: PacketReceiver) -> None:
        """Have ``packets`` get the trainer's packets, within :meth:`receive`."""
        self._reader.allocate = packets.allocate
        self._packets = packets

    def _unblock(self) -> None:
        """From now on, no thread that sends waits for the peer: :meth:`receive` sends the rest."""
        self.sock.setblocking(False)
        self._outbox = Outbox(self.sock, _MAX_UNSENT)
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._wake, self._waker):
            sock.setblocking(False)
            open_sockets.add(sock)
        for sock in (self._wake, self.sock):
            self._selector.register(sock, selectors.EVENT_READ)

    def join(self, hello: Hello, token: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
        """Join the trainer, if it proves that it knows the token; return its welcome.

        Raises:
            ConnectionError: it broke off, or there was no answer within ``timeout_s``; another try
                may succeed.
            LaunchError: the trainer refused, and says why; or it is no trainer, or that of another
                run.
        """
        deadline = time.monotonic() + timeout_s
        try:
            handshake, challenge = self._open(token, deadline)
            handshake.verify(self._ask(handshake.prove(challenge), deadline))
            self._reader.max_frame = MAX_FRAME
            self.welcome = decode(self._ask(to_bytes(hello), deadline))
        except _Refusal as error:
            raise LaunchError(f"the trainer refused this {hello.role}: {error}") from error
        except NotProven as error:
            raise LaunchError(
                f"{self._where} is not this run's trainer ({error}): check the address, and that "
                "DISTCOLLECT_TOKEN_FILE names a file with the same secret there and here"
            ) from error
        except LaunchError as error:
            raise LaunchError(
                f"{self._where} is no trainer of distcollect's ({error}): check the address"
            ) from error
        self._unblock()
        return self.welcome

    def _open(self, token: str, deadline: float) -> tuple[JoiningSide, bytes]:
        """Begin the handshake, within TLS if the trainer uses that; return the challenge too."""
        handshake = JoiningSide(token)
        challenge = self._ask(handshake.opening, deadline)
        if isinstance(decode(challenge), StartTls):
            self.sock = secured = tls.joining_tls(self.sock, deadline)
            self._outbox = Outbox(secured, MAX_FRAME)
            self._reader = FrameReader(_MAX_UNPROVEN_FRAME)
            handshake = JoiningSide(token, secured.fingerprint)
            return handshake, self._ask(handshake.opening, deadline)
        if tls.is_required() and not self._is_inherited:
            raise NotProven("it does not encrypt connections, which is wanted here")
        return handshake, challenge

    def _ask(self, data: bytes, deadline: float) -> bytes:
        """Send a frame of the handshake, and return the trainer's answer."""
        self._send(self._outbox.send, with_length(data))
        answer = self._receive_frame(deadline)
        if answer is None:
            raise ConnectionError("it took the connection, but did not answer the join handshake")
        message = decode(answer)
        if isinstance(message, Refused):
            raise _Refusal(printable(message.reason))
        return answer

    def send(self, message: Message) -> None:
        """Send a message; do nothing if the trainer is gone (:meth:`receive` reports that)."""
        self._send(self._outbox.send, encode(message))

    def send_soon(self, message: Message) -> None:
        """Have the thread that waits in :meth:`receive` send it; for handlers of signals."""
        self._soon.append(message)
        self._wake_up()

    def send_packet(self, packet: Packet) -> None:
        """Send a packet, whose parts must not change before the trainer has them.

        It does nothing if the trainer is gone.
        """
        self._send(self._outbox.send_packet, packet)

    def _send(self, send: Callable[[Any], bool], data: bytes | Packet) -> None:
        try:
            if send(data):
                self._wake_up()
        except OSError as error:
            log.debug("could not send to the trainer: %s", error)

    def _wake_up(self) -> None:
        """Have the thread that waits in :meth:`receive` send what is unsent."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def receive(self) -> Message | None:
        """Return the next message; None once the trainer is gone or can't be reached any more.

        Raises:
            LaunchError: what arrived is no message of ours.
        """
        data = self._receive_frame()
        return None if data is None else decode(data)

    def _receive_frame(self, deadline: float | None = None) -> bytes | None:
        """Return the next message's bytes; None if the trainer is gone, or the deadline passed."""
        while not isinstance(frame := self._reader.next(), bytes):
            if frame is not None:
                assert self._packets is not None
                self._packets.received(frame)
                continue
            try:
                if deadline is not None:
                    # A timeout of 0 would make the socket non-blocking.
                    self.sock.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._read():
                    return None
            except BlockingIOError:  # nothing but TLS's own messages came, or a part of one
                if deadline is not None and time.monotonic() > deadline:
                    return None
            except OSError:  # a TimeoutError may be the kernel's: the host can't be reached
                return None
        return frame

    def _read(self) -> bool:
        """Read once; False if the trainer is gone. Meanwhile, send what can be sent."""
        if self._selector is None:
            return self._reader.receive(self.sock)
        while True:
            while self._soon:
                self.send(self._soon.popleft())
            unsent = selectors.EVENT_WRITE if self._outbox.send() else 0
            with contextlib.suppress(BlockingIOError):
                return self._reader.receive(self.sock)
            if unsent != self._selector.get_key(self.sock).events & selectors.EVENT_WRITE:
                self._selector.modify(self.sock, selectors.EVENT_READ | unsent)
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._wake.recv(_WAKEUP_BYTES)

    def end(self) -> None:
        """End it, so that :meth:`receive` returns None; on any thread."""
        self._outbox.end()

    def close(self) -> None:
        """Close it; the trainer sees this process as gone."""
        self._outbox.close()
        if self._selector is not None:
            self._selector.close()
            self._wake.close()
            self._waker.close()


class TrainerGone(LaunchError):
    """Nobody listens at the trainer's address."""


def join(
    find: Callable[[], TrainerAddress],
    hello: Hello,
    timeout_s: float,
    *,
    name: str,
    give_up_if_refused: bool = False,
) -> tuple[ControlConnection, TrainerAddress]:
    """Join the trainer; return the connection, and the address that it leads to.

    Args:
        find: returns where the trainer is; raises OSError if that isn't known yet.
        hello: the message that introduces this process.
        timeout_s: how long to try.
        name: what to call this process in an error.
        give_up_if_refused: raise at once if nobody listens there.

    Raises:
        TrainerGone: nobody listens there.
        LaunchError: the trainer can't be reached within ``timeout_s``, or refused.
    """
    begin = time.monotonic()
    problem: Exception | None = None
    pause_s, where, has_said = _RETRY_S, "", False
    while (left_s := begin + timeout_s - time.monotonic()) > 0:
        try:
            trainer = find()
            where = f", at {trainer.host}:{trainer.port},"
            limit_s = min(_CONNECT_TIMEOUT_S, left_s)
            connection = ControlConnection(trainer.host, trainer.port, limit_s)
            try:
                connection.join(hello, trainer.token, min(ANSWER_TIMEOUT_S, left_s))
            except BaseException:
                connection.close()
                raise
            else:
                return connection, trainer
        except OSError as error:
            if give_up_if_refused and isinstance(error, ConnectionRefusedError):
                raise TrainerGone(f"{name} found no trainer{where.rstrip(',')}") from error
            # It isn't there yet; or, after a restart by torchrun, this was its previous address;
            # or too many strangers connect to it at the same time.
            problem = error
        # A name that nobody knows may be mistyped, or that of a pod that is not ready yet.
        is_long = time.monotonic() - begin > _SAY_AFTER_S or isinstance(problem, socket.gaierror)
        if is_long and not has_said:
            log.info(
                "%s waits up to %g s for the trainer%s and tries again: %s",
                name,
                timeout_s,
                where or ",",
                problem,
            )
            has_said = True
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _LONGEST_RETRY_S)
    raise LaunchError(
        f"{name} could not reach the trainer within {timeout_s:g} s; the last try{where} ended "
        f"with: {problem}. Is the trainer running, what does its own output say, and do firewalls "
        "let this host through?"
    )
