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
import enum
import errno
import logging
import math
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from distcollect.common import open_files
from distcollect.errors import LaunchError
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
from distcollect.net.handshake import (
    UNPROVEN,
    Opening,
    StartTls,
    TrainerSide,
    differing_versions,
    printable,
)
from distcollect.net.interfaces import listen
from distcollect.net.messages import Hello, Message, Refused, decode, decode_as, encode
from distcollect.net.tls import TlsSocket, TrainerTls

log = logging.getLogger(__name__)

# From accepting a connection until the peer's proof; and again from there until its Hello.
HANDSHAKE_TIMEOUT_S = 10.0
# Messages are small: a peer that takes no part of one for so long hangs.
SEND_TIMEOUT_S = 10.0
_MAX_UNSENT = 8 * MAX_FRAME
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
# Of a peer that has not proven the token.
_MAX_UNPROVEN_BYTES = 4096
_MAX_UNPROVEN_READS = 16
# From a peer that sends a large packet, before others have their turn.
_READS_AT_ONCE = 16


class State(enum.Enum):
    """Of a connection of the join server."""

    UNPROVEN = enum.auto()  # in the handshake
    PROVEN = enum.auto()  # the peer knows the token; its Hello has not come yet
    ADMITTED = enum.auto()
    REFUSED = enum.auto()  # what else the peer sends is not read; it is closed soon
    CLOSED = enum.auto()


class Connection:
    """The trainer's end of a connection to a process that joins.

    The join server alone uses it until the peer is admitted. Then others may send and close, on any
    thread.

    Attributes:
        hello: how the peer introduced itself; once it is admitted.
        state: see :class:`State`; the join server changes it, and what follows.
        sock: does not block.
        address: of the peer's host.
        handshake: see :class:`TrainerSide`.
        is_shaking_hands: TLS's own handshake is not over.
        reader: puts the peer's frames together.
        num_reads: how often something was read.
        outbox: what is still to be sent.
        is_own: it was made here, for a process that this one starts; no stranger can have it.
        packets: gets the packets of the peer, once it is admitted; None: they are dropped.
    """

    hello: Hello

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        token: str,
        has_unsent: Callable[[], None],
        *,
        is_own: bool = False,
    ) -> None:
        """``has_unsent``: called when the peer does not take all at once."""
        self.address = address
        self._token = token
        self.is_own = is_own
        self.packets: PacketReceiver | None = None
        self.state = State.UNPROVEN
        self.is_shaking_hands = False
        self.num_reads = 0
        self._has_unsent = has_unsent
        self._begin(sock)

    def _begin(self, sock: Any, fingerprint: bytes = b"") -> None:
        self.sock = sock
        self.handshake = TrainerSide(self._token, fingerprint)
        self.reader = FrameReader(_MAX_UNPROVEN_BYTES)
        self.outbox = Outbox(sock, _MAX_UNSENT)

    @property
    def num_pending(self) -> int:
        """Bytes that have come, and that no selector tells of."""
        return self.sock.pending() if isinstance(self.sock, TlsSocket) else 0

    def secure(self, tls: TrainerTls) -> None:
        """Use TLS from now on, and begin the handshake anew."""
        self.is_shaking_hands = True
        self._begin(TlsSocket(self.sock, tls.context, is_trainer=True), tls.fingerprint)

    @property
    def is_over(self) -> bool:
        """Return True if nothing more is read."""
        return self.state in (State.REFUSED, State.CLOSED)

    @property
    def is_stranger(self) -> bool:
        """Return True if the peer has not proven that it knows the token."""
        return self.state in (State.UNPROVEN, State.REFUSED) and not self.is_own

    def carry(self, packets: PacketReceiver | None) -> None:
        """Have ``packets`` get the peer's packets, which sends none before it is asked.

        None: what still comes is dropped.
        """
        self.packets = packets
        if packets is not None:
            self.reader.allocate = packets.allocate

    def send_packet(self, packet: Packet) -> None:
        """Send a packet without waiting for the peer; its parts must not change meanwhile.

        Raises:
            OSError: the peer is gone, or does not take what is sent.
        """
        self._send(self.outbox.send_packet, packet)

    def _send(self, send: Callable[[Any], bool], data: bytes | Packet) -> None:
        try:
            if send(data):
                self._has_unsent()
        except OSError:
            self.outbox.end()
            raise

    def send(self, message: Message) -> None:
        """Send a message without waiting for the peer; do nothing if the peer is gone.

        The server's thread sends what the peer does not take now. A peer that takes nothing for
        :data:`SEND_TIMEOUT_S` is cut off. Its end is reported in both cases.
        """
        with contextlib.suppress(OSError):
            self._send(self.outbox.send, encode(message))

    def close(self) -> None:
        """End the connection; it is reported as closed."""
        self.outbox.end()


class JoinServerEvents:
    """Events of a join server, on its own thread. Override what is of interest."""

    def admit(self, connection: Connection) -> Message | None:
        """Admit a peer with the right token and versions: return its welcome, or Refused.

        None: its welcome was sent here, so that other messages could follow at once.
        """
        raise NotImplementedError

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
        port: where it listens; 0: nowhere.
        tls: what who connects has to use; None: no TLS.
    """

    def __init__(
        self,
        address: str | None,
        token: str,
        events: JoinServerEvents,
        port: int = 0,
        *,
        tls: TrainerTls | None = None,
    ) -> None:
        """Listen on ``address`` alone; None: only who gets a connection by :meth:`connect` joins.

        ``tls``: who connects has to use TLS.

        Raises:
            LaunchError: see :func:`~distcollect.net.interfaces.listen`.
        """
        self.events = events
        self._token = token
        self.tls = tls
        self._listener = None if address is None else listen(address, port)
        self.port: int = 0 if self._listener is None else self._listener.getsockname()[1]
        self._max_strangers = max(1, min(MAX_STRANGERS, open_files.limit() // _SHARE_OF_FILES))
        # When each connection is closed unless something happens before; the oldest first.
        self._deadlines: dict[Connection, float] = {}
        # Each connection that is accepted moves this time on, and may move it so far ahead.
        self._accepted_until = 0.0
        self._most_ahead_s = (2.0 * MAX_STRANGERS - 1) / _STRANGERS_PER_S
        self._accept_at = math.inf  # infinite while connections are accepted
        self._notices: Counter[str] = Counter()  # in this period, by kind
        self._period_ends = math.inf
        self._is_closing = threading.Event()
        self._close_by = math.inf
        self._wake, self._waker = socket.socketpair()
        read = [sock for sock in (self._listener, self._wake) if sock is not None]
        self._sockets = (*read, self._waker)
        self._own: deque[socket.socket] = deque()  # that are not served yet
        self._unread: deque[Connection] = deque()  # with bytes that no selector tells of
        self._selector = selectors.DefaultSelector()
        for sock in self._sockets:
            sock.setblocking(False)
            open_sockets.add(sock)
        for sock in read:
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="distcollect-join", daemon=True)
        self._thread.start()

    @property
    def num_strangers(self) -> int:
        """Connections without a proof, and refused ones that are not closed yet."""
        return sum(connection.is_stranger for connection in list(self._deadlines))

    def connect(self) -> socket.socket:
        """Return the other end of a new connection, for a process that this one starts."""
        here, there = socket.socketpair()
        open_sockets.update((here, there))
        self._own.append(here)
        self._wake_up()
        return there

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
            times = (self._accept_at, self._period_ends, self._close_by)
            due = min(*times, *self._deadlines.values())
            pause_s = None if due == math.inf else max(0.0, due - time.monotonic())
            for key, events in self._selector.select(pause_s):
                self._guarded(key.data, self._serve, key, events)
            if (now := time.monotonic()) >= due:
                self._guarded(None, self._do_what_is_due, now)
        for connection in self._deadlines:
            connection.outbox.close()
        for sock in (*self._sockets, *self._own):
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
        """Return True if this was closed, and its last messages were sent or had time enough."""
        if not self._is_closing.is_set():
            return False
        if self._close_by == math.inf:
            self._close_by = time.monotonic() + _CLOSE_TIMEOUT_S
            self._pause_accepting(math.inf)
        return not self._with_unsent() or time.monotonic() >= self._close_by

    def _with_unsent(self) -> list[Connection]:
        return [each for each in self._deadlines if each.outbox.num_unsent]

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept(self._listener)
        elif key.fileobj is self._wake:
            self._wake.recv(65536)
            for _ in range(len(self._unread)):
                connection = self._unread.popleft()
                self._guarded(connection, self._read, connection)
            while self._own:
                self._serve_new(self._own.popleft(), "this host", math.inf, is_own=True)
            for connection in self._with_unsent():
                self._write(connection)
        else:
            if events & selectors.EVENT_WRITE:
                self._write(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _do_what_is_due(self, now: float) -> None:
        if self._accept_at <= now:
            self._accept_at = math.inf
            assert self._listener is not None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [each for each, at in self._deadlines.items() if at <= now]:
            where = f"from {connection.address}"
            if connection.state is State.ADMITTED:
                self._note(f"cut off: nothing was taken for {SEND_TIMEOUT_S:g} s", where)
            elif connection.state is not State.REFUSED:
                self._note(f"closed: no handshake within {HANDSHAKE_TIMEOUT_S:g} s", where)
            self._drop(connection)
        if self._period_ends <= now:
            self._period_ends = math.inf
            notices, self._notices = self._notices, Counter()
            for kind, count in notices.items():
                if count > _REPORTS:
                    number = f"{count - _REPORTS} more connections were {kind}"
                    self._report(kind, f"{number} (within {_REPORT_PERIOD_S:g} s)")

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
        self._accept_at = until
        if self._listener is not None:
            with contextlib.suppress(KeyError):  # it pauses already
                self._selector.unregister(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        begin = max(now, self._accepted_until)
        if begin > now + self._most_ahead_s:
            self._pause_accepting(begin - self._most_ahead_s)
            return
        self._accepted_until = begin + 1 / _STRANGERS_PER_S
        try:
            sock, (address, *_) = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is gone already
            return
        except OSError as error:
            self._note("not accepted", str(error))
            if error.errno not in _NO_ROOM or not self._drop_oldest_stranger():
                self._pause_accepting(now + _ACCEPT_PAUSE_S)
            return
        if self.num_strangers >= self._max_strangers:
            self._note("closed to make room: too many did not prove the token", "the oldest")
            self._drop_oldest_stranger()
        self._serve_new(sock, str(address), now + HANDSHAKE_TIMEOUT_S)

    def _serve_new(
        self, sock: socket.socket, address: str, deadline: float, *, is_own: bool = False
    ) -> None:
        connection = Connection(sock, address, self._token, self._wake_up, is_own=is_own)
        self._deadlines[connection] = deadline
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
        with contextlib.suppress(KeyError, ValueError):  # refused, or gone when it was accepted
            self._selector.unregister(connection.sock)
        connection.outbox.close()
        if was_admitted:
            try:
                if connection.packets is not None:
                    connection.packets.ended()
                self.events.closed(connection)
            except Exception:
                log.exception("the end of a connection could not be reported")

    def _read(self, connection: Connection) -> None:
        if connection.is_over:
            return
        for _ in range(_READS_AT_ONCE):
            connection.num_reads += 1
            try:
                if connection.is_shaking_hands:
                    connection.sock.do_handshake()
                    connection.is_shaking_hands = False
                if not connection.reader.receive(connection.sock):
                    self._drop(connection)
                    return
            except BlockingIOError:
                self._handle_all(connection)
                return
            except OSError:
                self._drop(connection)
                return
            self._handle_all(connection)
            if not (connection.reader.is_in_packet or connection.num_pending):
                return
        # Else the selector says when there is more, or its turn comes anyhow.
        if connection.num_pending and connection not in self._unread:
            self._unread.append(connection)
            self._wake_up()

    def _handle_all(self, connection: Connection) -> None:
        """Handle all frames that have come."""
        try:
            while not connection.is_over and (frame := connection.reader.next()) is not None:
                self._handle(connection, frame)
        except LaunchError as error:
            if connection.state is not State.UNPROVEN:
                raise
            self._refuse_stranger(connection, f"{UNPROVEN} ({printable(str(error)[:100])})")
        if connection.state is State.UNPROVEN and connection.num_reads >= _MAX_UNPROVEN_READS:
            self._refuse_stranger(connection, UNPROVEN)

    def _handle(self, connection: Connection, frame: bytes | Packet) -> None:
        if isinstance(frame, Packet):
            if connection.packets is not None:
                connection.packets.received(frame)
        elif self.tls and not (connection.is_own or isinstance(connection.sock, TlsSocket)):
            decode_as(Opening, frame)
            if self._sent(connection, encode(StartTls())):
                connection.secure(self.tls)  # what follows begins anew
        elif connection.state is State.UNPROVEN:
            answer = with_length(connection.handshake.answer(frame))
            if connection.handshake.is_proven:
                connection.state = State.PROVEN
                self._deadlines[connection] = time.monotonic() + HANDSHAKE_TIMEOUT_S
                self._accepted_until -= 1 / _STRANGERS_PER_S
                connection.reader.max_frame = MAX_FRAME
            self._sent(connection, answer)
        elif connection.state is State.PROVEN:
            self._introduce(connection, frame)
        else:
            self.events.received(connection, decode(frame))

    def _introduce(self, connection: Connection, frame: bytes) -> None:
        # The versions count first: another protocol's message may differ.
        differing = differing_versions(connection.handshake.versions)
        try:
            hello = connection.hello = decode_as(Hello, frame)
        except LaunchError as error:  # for example a rank of the doctor at a trainer's port
            self._refuse_stranger(connection, differing or str(error))
            return
        answer = Refused(differing) if differing else self.events.admit(connection)
        if isinstance(answer, Refused):
            self._refuse(connection, answer)
            if differing:
                self.events.refused(hello, differing)
            return
        connection.state = State.ADMITTED
        self._deadlines[connection] = math.inf
        if answer is not None:
            connection.send(answer)

    def _refuse_stranger(self, connection: Connection, reason: str) -> None:
        self._refuse(connection, Refused(reason))
        self._note(_REFUSED, f"{reason} (from {connection.address})")

    def _refuse(self, connection: Connection, answer: Refused) -> None:
        """Send the answer, and close the connection once the peer has had time to read it."""
        if not self._sent(connection, encode(answer)):
            return
        connection.state = State.REFUSED
        self._selector.unregister(connection.sock)
        connection.outbox.end_sending()
        self._deadlines[connection] = time.monotonic() + _LINGER_S

    def _sent(self, connection: Connection, data: bytes) -> bool:
        """Send to a peer that was not admitted; drop it if it does not take all of it at once."""
        with contextlib.suppress(OSError):
            if not connection.outbox.send(data):
                return True
        self._drop(connection)  # these few bytes always fit, unless it is gone
        return False

    def _write(self, connection: Connection) -> None:
        """Send what is unsent; the peer has a time limit from now, or from when it took some."""
        if connection.state is not State.ADMITTED:
            return
        num_before = connection.outbox.num_unsent
        try:
            has_unsent = connection.outbox.send()
        except OSError:
            self._drop(connection)
            return
        if not has_unsent:
            self._deadlines[connection] = math.inf
        elif self._deadlines[connection] == math.inf or connection.outbox.num_unsent < num_before:
            self._deadlines[connection] = time.monotonic() + SEND_TIMEOUT_S
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_unsent else 0)
        self._selector.modify(connection.sock, events, connection)
