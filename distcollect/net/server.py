"""The trainer's side of control connections: the join handshake, and who is connected.

A plain TCP connection between the trainer and each worker (and each supervisor of a launched
rank), carrying :mod:`.messages`. It comes before RPC: nothing is unpickled from a process that has
not proven that it knows the run's token (:mod:`.handshake`), and has matching versions. It stays
open while both processes live. When a process ends in any way, the kernel closes it, and the other
side sees that at once.

Anybody who reaches the port can connect, so a connection without a proof has little: a few KiB and
reads, ten seconds, and no thread that waits for it. Their number is limited, and the number that is
accepted per second. Above the limit the oldest is closed, so a silent one takes no worker's place.
The server's thread never waits for a single peer, not even for one that has joined.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from distcollect.common import open_files
from distcollect.errors import LaunchError
from distcollect.net.connection import MAX_UNPROVEN_BYTES, Connection, State
from distcollect.net.framing import (
    MAX_FRAME,
    Frame,
    configure_socket,
    open_sockets,
    parse,
    with_length,
)
from distcollect.net.handshake import UNPROVEN, NotProven, differing_versions
from distcollect.net.interfaces import listen
from distcollect.net.messages import Hello, Message, Refused, decode, decode_as, encode

log = logging.getLogger(__name__)

# From accepting a connection until the peer's proof; and again from there until its Hello.
HANDSHAKE_TIMEOUT_S = 10.0
# Messages are small: a peer that takes no part of one for so long hangs.
SEND_TIMEOUT_S = 10.0
# A refused peer has so long to read why.
_LINGER_S = 1.0
# For what is still to be sent when the server closes.
_CLOSE_TIMEOUT_S = 2.0
# Connections without a proof, and refused ones that are not closed yet; but never more than a
# share of the open files that this process may have.
MAX_STRANGERS = 1024
_SHARE_OF_FILES = 4
# Per second in the long run. Each costs some 0.2 ms of this thread's time; one that leads to a
# proof is not counted. At once, as many may come as have room here and in the kernel's queue.
_STRANGERS_PER_S = 100.0
_ACCEPT_PAUSE_S = 0.5
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# Of each kind of event, so many are reported one by one in a period, the others as a number.
_REPORTS, _REPORT_PERIOD_S = 10, 10.0
_REFUSED = "refused"
# How often to look at what has a time limit.
_TICK_S = 0.25
# Of a peer that has not proven the token.
MAX_UNPROVEN_READS = 16


class JoinServerEvents:
    """Events of a join server, on its own thread. Override what is of interest."""

    def admit(self, connection: Connection) -> Message:
        """Admit a peer with the right token and versions: return its welcome, or Refused."""
        raise NotImplementedError

    def admitted(self, connection: Connection) -> None:
        """Note that the welcome was sent: other messages may follow."""

    def refused(self, hello: Hello | None, reason: str) -> None:
        """Note that a peer was refused.

        ``hello`` is None if it did not prove that it knows the token, or is unreadable. Then one
        call may stand for many such peers; the reason says so.
        """

    def received(self, connection: Connection, message: Message) -> None:
        """Handle a message of an admitted peer."""

    def closed(self, connection: Connection) -> None:
        """Note that an admitted peer is gone."""


class JoinServer:
    """Where the workers and supervisors of a run join: one listener, one thread for all.

    Attributes:
        events: to report to; may be replaced at any time.
        address: where it listens.
        port: where it listens.
        max_strangers: the most connections without a proof, and refused ones that are not closed.
    """

    def __init__(self, address: str, token: str, events: JoinServerEvents, port: int = 0) -> None:
        """Listen on ``address`` alone.

        Raises:
            LaunchError: see :func:`~distcollect.net.interfaces.listen`.
        """
        self.events = events
        self._token = token
        self._listener = listen(address, port)
        self._listener.setblocking(False)
        open_sockets.add(self._listener)
        self.address: str = address
        self.port: int = self._listener.getsockname()[1]
        self.max_strangers = max(1, min(MAX_STRANGERS, open_files.limit() // _SHARE_OF_FILES))
        # Each with the time at which it is closed unless something happens before; the oldest
        # first.
        self._deadlines: dict[Connection, float] = {}
        self._allowance = self._most_at_once = 2.0 * MAX_STRANGERS  # connections to accept
        self._paused_until: float | None = None  # None: connections are accepted
        self._notices: Counter[str] = Counter()  # in this period, by kind
        self._period_ends = math.inf
        # When to look at what has a time limit; infinite if nothing has one.
        self._ticked_at = time.monotonic()
        self._tick_at = math.inf
        self._is_closing = threading.Event()
        self._close_by = math.inf
        self._wake, self._waker = socket.socketpair()
        for sock in (self._wake, self._waker):
            sock.setblocking(False)
            open_sockets.add(sock)
        self._selector = selectors.DefaultSelector()
        for readable in (self._listener, self._wake):
            self._selector.register(readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="distcollect-join", daemon=True)
        self._thread.start()

    @property
    def num_strangers(self) -> int:
        """Connections without a proof, and refused ones that are not closed yet."""
        return sum(connection.is_stranger for connection in list(self._deadlines))

    def close(self) -> None:
        """Close all connections: each peer takes that as the trainer's end."""
        self._is_closing.set()
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _wake_up(self) -> None:
        """Have this server's thread look at what is unsent, and whether it is to end."""
        # By a byte, not by closing the socket: a forked child of this process may hold it open.
        with contextlib.suppress(OSError):  # closed before; or full, so it is awake anyhow
            self._waker.send(b"x")

    def _run(self) -> None:
        while not self._is_over():
            pause_s = max(0.0, self._tick_at - time.monotonic())
            ready = self._selector.select(None if pause_s == math.inf else pause_s)
            for key, events in ready:
                self._guarded(key.data, self._serve, key, events)
            now = time.monotonic()
            if now >= self._tick_at:
                self._guarded(None, self._tick, now)
            elif ready:  # perhaps there is something with a time limit now
                self._tick_at = min(self._tick_at, now + _TICK_S)
        for connection in self._deadlines:
            connection.outbox.close()
        for sock in (self._listener, self._wake, self._waker):
            sock.close()
        self._selector.close()

    def _guarded(
        self, connection: Connection | None, work: Callable[..., None], *args: Any
    ) -> None:
        # Nothing that a peer sends may end the thread that sees workers come and go.
        try:
            work(*args)
        except Exception as error:
            if connection is None:
                log.exception("the join server failed")
            else:
                self._note("closed after an unusable message", str(error))
                self._drop(connection)

    def _is_over(self) -> bool:
        """Return whether this was closed, and its last messages were sent or had time enough."""
        if not self._is_closing.is_set():
            return False
        if self._close_by == math.inf:
            self._close_by = time.monotonic() + _CLOSE_TIMEOUT_S
            self._pause_accepting(math.inf)
        has_unsent = any(each.outbox.num_unsent for each in self._deadlines)
        return not has_unsent or time.monotonic() >= self._close_by

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake:
            self._wake.recv(65536)
            for connection in list(self._deadlines):
                if connection.outbox.num_unsent:
                    self._write(connection)
        else:
            if events & selectors.EVENT_WRITE:
                self._write(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _tick(self, now: float) -> None:
        """Do what is due, and plan the next time."""
        self._tick_at = now + _TICK_S
        gained = (now - self._ticked_at) * _STRANGERS_PER_S
        self._allowance = min(self._most_at_once, self._allowance + gained)
        self._ticked_at = now
        if self._paused_until is not None and self._paused_until <= now and self._allowance >= 1:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [each for each, at in self._deadlines.items() if at <= now]:
            where = f"from {connection.address}"
            if connection.state is State.ADMITTED:
                self._note(f"cut off: nothing was taken for {SEND_TIMEOUT_S:g} s", where)
            elif connection.state is not State.REFUSED:
                self._note(f"closed: no handshake within {HANDSHAKE_TIMEOUT_S:g} s", where)
            self._drop(connection)
        if self._period_ends <= now:
            for kind, count in self._notices.items():
                if count > _REPORTS:
                    number = f"{count - _REPORTS} more connections were {kind}"
                    self._report(kind, f"{number} (within {_REPORT_PERIOD_S:g} s)")
            self._notices.clear()
            self._period_ends = math.inf
        is_timed = (
            self._paused_until is not None
            or self._allowance < self._most_at_once
            or min([self._period_ends, *self._deadlines.values()]) < math.inf
        )
        if not is_timed:
            self._tick_at = math.inf

    def _note(self, kind: str, detail: str) -> None:
        """Report what became of a connection, or count it if there are many of the ``kind``."""
        if not self._notices:
            self._period_ends = time.monotonic() + _REPORT_PERIOD_S
        self._notices[kind] += 1
        if self._notices[kind] <= _REPORTS:
            text = detail if kind == _REFUSED else f"a connection was {kind} ({detail})"
            self._report(kind, text)

    def _report(self, kind: str, text: str) -> None:
        if kind == _REFUSED:
            self.events.refused(None, text)
        else:
            log.warning("%s", text)

    def _pause_accepting(self, until: float) -> None:
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._paused_until = until

    def _accept(self) -> None:
        now = time.monotonic()
        if self._allowance < 1:
            self._pause_accepting(now)
            return
        self._allowance -= 1
        try:
            sock, (address, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is gone already
            return
        except OSError as error:
            self._note("not accepted", str(error))
            if error.errno not in _NO_ROOM or not self._drop_oldest_stranger():
                self._pause_accepting(now + _ACCEPT_PAUSE_S)
            return
        if self.num_strangers >= self.max_strangers:
            self._note("closed to make room: too many did not prove the token", "the oldest")
            self._drop_oldest_stranger()
        connection = Connection(sock, str(address), self._token, self._wake_up)
        self._deadlines[connection] = now + HANDSHAKE_TIMEOUT_S
        try:
            sock.setblocking(False)
            configure_socket(sock)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except OSError:  # it is gone already
            self._drop(connection)

    def _drop_oldest_stranger(self) -> bool:
        """Close the stranger that is there for longest, a refused one first; return if there is."""
        strangers = [each for each in self._deadlines if each.is_stranger]
        strangers.sort(key=lambda each: each.state is not State.REFUSED)
        for stranger in strangers[:1]:
            self._drop(stranger)
        return bool(strangers)

    def _drop(self, connection: Connection) -> None:
        if connection.state is State.CLOSED:
            return
        was_admitted = connection.state is State.ADMITTED
        connection.state = State.CLOSED
        del self._deadlines[connection]
        with contextlib.suppress(KeyError):  # it was refused, or gone when it was accepted
            self._selector.unregister(connection.sock)
        connection.outbox.close()
        if was_admitted:
            try:
                self.events.closed(connection)
            except Exception:
                log.exception("the end of a connection could not be reported")

    def _read(self, connection: Connection) -> None:
        if connection.is_over:
            return
        is_unproven = connection.state is State.UNPROVEN
        try:
            data = connection.sock.recv(MAX_UNPROVEN_BYTES if is_unproven else 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.reader.feed(data)
        connection.num_reads += 1
        try:
            while not connection.is_over and (frame := connection.reader.next()) is not None:
                self._handle(connection, frame)
        except NotProven as error:
            self._refuse_stranger(connection, str(error))
        except LaunchError as error:
            if connection.state is not State.UNPROVEN:
                raise
            self._refuse_stranger(connection, f"{UNPROVEN} ({str(error)[:100]})")
        if connection.state is State.UNPROVEN and connection.num_reads >= MAX_UNPROVEN_READS:
            self._refuse_stranger(connection, UNPROVEN)

    def _handle(self, connection: Connection, frame: bytes) -> None:
        if connection.state is State.UNPROVEN:
            answer = with_length(connection.handshake.answer(frame))
            if connection.handshake.is_proven:
                connection.state = State.PROVEN
                self._deadlines[connection] = time.monotonic() + HANDSHAKE_TIMEOUT_S
                self._allowance = min(self._most_at_once, self._allowance + 1)
                connection.reader.max_frame = MAX_FRAME
            if not self._sent(connection, answer):
                self._drop(connection)  # these few bytes always fit, unless it is gone
        elif connection.state is State.PROVEN:
            self._introduce(connection, parse(frame))
        else:
            self.events.received(connection, decode(parse(frame)))

    def _introduce(self, connection: Connection, frame: Frame) -> None:
        # The versions count first: another protocol's message may differ.
        differing = differing_versions(connection.handshake.versions)
        try:
            hello = decode_as(Hello, frame)
        except LaunchError as error:  # for example a rank of the doctor at a trainer's port
            self._refuse_stranger(connection, differing or str(error))
            return
        connection.hello = hello
        answer = Refused(differing) if differing else self.events.admit(connection)
        if isinstance(answer, Refused):
            self._refuse(connection, answer)
            if differing:
                self.events.refused(hello, differing)
            return
        connection.state = State.ADMITTED
        self._deadlines[connection] = math.inf
        connection.send(answer)
        self.events.admitted(connection)

    def _refuse_stranger(self, connection: Connection, reason: str) -> None:
        self._refuse(connection, Refused(reason))
        self._note(_REFUSED, f"{reason} (from {connection.address})")

    def _refuse(self, connection: Connection, answer: Refused) -> None:
        """Send the answer, and close the connection once the peer has had time to read it."""
        if not self._sent(connection, encode(answer)):
            self._drop(connection)
            return
        connection.state = State.REFUSED
        self._selector.unregister(connection.sock)
        connection.outbox.end_sending()
        self._deadlines[connection] = time.monotonic() + _LINGER_S

    @staticmethod
    def _sent(connection: Connection, data: bytes) -> bool:
        """Send to a peer that was not admitted; return whether it was sent at once, as a whole."""
        try:
            return not connection.outbox.send(data)
        except OSError:
            return False

    def _write(self, connection: Connection) -> None:
        """Send what is unsent; the peer has a time limit from now, or from when it took some."""
        if connection.state is not State.ADMITTED:
            return
        num_before, is_new = connection.outbox.num_unsent, self._deadlines[connection] == math.inf
        try:
            has_unsent = connection.outbox.send()
        except OSError:
            self._drop(connection)
            return
        if not has_unsent:
            self._deadlines[connection] = math.inf
        elif is_new or connection.outbox.num_unsent < num_before:
            self._deadlines[connection] = time.monotonic() + SEND_TIMEOUT_S
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_unsent else 0)
        self._selector.modify(connection.sock, events, connection)
