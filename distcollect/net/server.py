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
from collections import deque
from collections.abc import Callable
from functools import partial

from distcollect.common import open_files
from distcollect.common.deadlines import Deadlines
from distcollect.common.rate_limit import Allowance, RepeatLimit
from distcollect.errors import LaunchError
from distcollect.net.framing import (
    MAX_FRAME,
    Frame,
    configure_socket,
    open_sockets,
    parse,
    with_length,
)
from distcollect.net.handshake import UNPROVEN, NotProven, TrainerSide, differing_versions
from distcollect.net.interfaces import listen
from distcollect.net.messages import Hello, Message, Refused, decode, decode_as, encode
from distcollect.net.peer import MAX_UNPROVEN_BYTES, MAX_UNPROVEN_READS, Connection, Peer, PeerState

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


class JoinServerEvents:
    """What a join server reports, on its own thread. Override what is of interest."""

    def admit(self, connection: Connection) -> Message:
        """A peer with the right token and versions joins; the answer: its welcome or Refused."""
        raise NotImplementedError

    def admitted(self, connection: Connection) -> None:
        """The welcome was sent: other messages may follow."""

    def refused(self, hello: Hello | None, reason: str) -> None:
        """A peer was refused.

        ``hello`` is None if it did not prove that it knows the token, or is unreadable. Then one
        call may stand for many such peers; the reason says so.
        """

    def received(self, connection: Connection, message: Message) -> None:
        """A message came from an admitted peer."""

    def closed(self, connection: Connection) -> None:
        """An admitted peer is gone."""


class _Notice(enum.Enum):
    """A kind of event that strangers can cause as often as they like; the value is its plural."""

    REFUSED = "more connections were refused"
    LATE = "more connections did not prove the token in time, and were closed"
    CROWDED = "more connections were closed to make room: too many did not prove the token"
    STALLED = "more peers took nothing of what was sent to them, and were cut off"
    UNUSABLE = "more connections were closed after an unusable message"
    NOT_ACCEPTED = "more connections could not be accepted"
    FAILED = "more failures of the join server"


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
        self._allowance = Allowance(2 * MAX_STRANGERS, _STRANGERS_PER_S)
        self._notices: RepeatLimit[_Notice] = RepeatLimit(_REPORTS, _REPORT_PERIOD_S)
        self._is_accepting = True
        self._accept_at = math.inf  # when to accept again
        self._close_by = math.inf  # when to close at the latest, once close() was called
        self._peers: set[Peer] = set()
        self._unproven: Deadlines[Peer] = Deadlines(HANDSHAKE_TIMEOUT_S)
        self._proven: Deadlines[Peer] = Deadlines(HANDSHAKE_TIMEOUT_S)
        self._refused: Deadlines[Peer] = Deadlines(_LINGER_S)
        self._stalled: Deadlines[Peer] = Deadlines(SEND_TIMEOUT_S)
        self._have_unsent: deque[Peer] = deque()  # from other threads
        self._closing = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="distcollect-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections: each peer takes that as the trainer's end."""
        self._closing.set()
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _wake_up(self) -> None:
        # By a byte, not by closing the socket: a forked child of this process may hold it open.
        with contextlib.suppress(OSError):  # closed before; or full, so it is awake anyhow
            self._waker.send(b"x")

    def _run(self) -> None:
        while not self._is_finished:
            for key, events in self._selector.select(self._time_left()):
                self._guarded(partial(self._serve, key, events), key.data)
            self._guarded(self._do_what_is_due)
        self._close_all()

    def _time_left(self) -> float | None:
        """Until something is due, in seconds."""
        groups = (self._unproven, self._proven, self._refused, self._stalled, self._notices)
        next_at = min(self._accept_at, self._close_by, *(group.next_at for group in groups))
        return None if next_at == math.inf else max(0.0, next_at - time.monotonic())

    def _guarded(self, work: Callable[[], None], peer: Peer | None = None) -> None:
        # Nothing that a peer sends may end the thread that sees workers come and go.
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see above
            if peer is None:
                self._note(_Notice.FAILED, f"the join server failed: {error!r}")
                return
            self._note(_Notice.UNUSABLE, f"closing a connection after an unusable message: {error}")
            self._drop(peer)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake:
            self._wake.recv(65536)
            while self._have_unsent:
                self._await_room(self._have_unsent.popleft())
        else:
            peer: Peer = key.data
            if events & selectors.EVENT_WRITE and peer.state is not PeerState.CLOSED:
                self._write(peer)
            if events & selectors.EVENT_READ and peer.is_read:
                self._read(peer)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._accept_at <= now:
            self._accept_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_accepting = True
        for peer in (*self._unproven.due(now), *self._proven.due(now)):
            self._note(
                _Notice.LATE,
                f"closing a connection from {peer.address}: it did not finish the handshake within "
                f"{HANDSHAKE_TIMEOUT_S:g} s",
            )
            self._drop(peer)
        for peer in self._refused.due(now):
            self._drop(peer)
        for peer in self._stalled.due(now):
            self._note(
                _Notice.STALLED,
                f"closing a connection to {peer.address}: it took nothing of what was sent to it "
                f"for {SEND_TIMEOUT_S:g} s",
            )
            self._drop(peer)
        for notice, num_more in self._notices.ended(now).items():
            if num_more:
                period = f"within {self._notices.period_s:g} s"
                self._report(notice, f"{num_more} {notice.value} ({period})")

    def _note(self, notice: _Notice, text: str) -> None:
        """Report an event, or count it if there are many."""
        if self._notices.passes(notice, time.monotonic()):
            self._report(notice, text)

    def _report(self, notice: _Notice, text: str) -> None:
        if notice is _Notice.REFUSED:
            self.events.refused(None, text)
        else:
            log.warning("%s", text)

    @property
    def _is_finished(self) -> bool:
        """Whether the server was closed, and its last messages were sent or had time enough."""
        if not self._closing.is_set():
            return False
        if self._close_by == math.inf:
            self._close_by = time.monotonic() + _CLOSE_TIMEOUT_S
            self._pause_accepting(math.inf)
        has_unsent = self._have_unsent or len(self._stalled)
        return not has_unsent or time.monotonic() >= self._close_by

    def _close_all(self) -> None:
        for peer in list(self._peers):
            peer.outbox.close()
        for sock in (self._listener, self._wake, self._waker):
            sock.close()
        self._selector.close()

    def _pause_accepting(self, until: float) -> None:
        if self._is_accepting:
            self._selector.unregister(self._listener)
        self._is_accepting = False
        self._accept_at = until

    def _accept(self) -> None:
        now = time.monotonic()
        if not self._allowance.take(now):
            self._pause_accepting(self._allowance.next_at(now))
            return
        try:
            sock, (address, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it is gone already
            return
        except OSError as error:
            self._note(_Notice.NOT_ACCEPTED, f"could not accept a connection: {error}")
            if error.errno not in _NO_ROOM or not self._drop_oldest_stranger():
                self._pause_accepting(now + _ACCEPT_PAUSE_S)
            return
        if len(self._unproven) + len(self._refused) >= self.max_strangers:
            self._note(
                _Notice.CROWDED,
                f"closing the oldest of {self.max_strangers} connections that did not show the "
                "token, to make room for others",
            )
            self._drop_oldest_stranger()
        peer = Peer(sock, str(address), TrainerSide(self._token))
        self._peers.add(peer)
        try:
            sock.setblocking(False)
            configure_socket(sock)
            self._selector.register(sock, selectors.EVENT_READ, peer)
        except OSError:  # it is gone already
            self._drop(peer)
        else:
            self._unproven.add(peer, now)

    def _drop_oldest_stranger(self) -> bool:
        """Close the stranger that is there for longest; returns whether there was one."""
        stranger = self._refused.oldest or self._unproven.oldest
        if stranger is not None:
            self._drop(stranger)
        return stranger is not None

    def _drop(self, peer: Peer) -> None:
        if peer.state is PeerState.CLOSED:
            return
        was_admitted, is_watched = peer.state is PeerState.ADMITTED, peer.is_read
        peer.enter(PeerState.CLOSED)
        self._forget_deadlines(peer)
        self._peers.discard(peer)
        if is_watched:
            with contextlib.suppress(KeyError):  # it was gone when it was accepted
                self._selector.unregister(peer.sock)
        peer.outbox.close()
        if was_admitted:
            assert peer.connection is not None
            try:
                self.events.closed(peer.connection)
            except Exception:
                log.exception("the end of a connection could not be reported")

    def _forget_deadlines(self, peer: Peer) -> None:
        for group in (self._unproven, self._proven, self._refused, self._stalled):
            group.discard(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(MAX_UNPROVEN_BYTES if peer.is_stranger else 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.reader.feed(data)
        peer.num_reads += 1
        try:
            while peer.is_read and (frame := peer.reader.next()) is not None:
                self._handle(peer, frame)
        except NotProven as error:
            self._refuse(peer, None, str(error))
        except LaunchError as error:
            if not peer.is_stranger:
                raise
            self._refuse(peer, None, f"{UNPROVEN} ({error})")
        if peer.is_stranger and peer.num_reads >= MAX_UNPROVEN_READS:
            self._refuse(peer, None, UNPROVEN)

    def _handle(self, peer: Peer, frame: bytes) -> None:
        if peer.state is PeerState.UNPROVEN:
            answer = with_length(peer.handshake.answer(frame))
            if peer.handshake.is_proven:
                self._unproven.discard(peer)
                self._proven.add(peer, time.monotonic())
                self._allowance.give_back()
                peer.enter(PeerState.PROVEN)
                peer.reader.max_frame = MAX_FRAME
            if self._sent(peer, answer):
                return
            self._drop(peer)  # these few bytes always fit, unless it is gone
        elif peer.state is PeerState.PROVEN:
            self._introduce(peer, parse(frame))
        else:
            assert peer.connection is not None
            self.events.received(peer.connection, decode(parse(frame)))

    def _introduce(self, peer: Peer, frame: Frame) -> None:
        # The versions are compared before the message is decoded: another protocol's may differ.
        if differing := differing_versions(peer.handshake.versions):
            hello = None
            with contextlib.suppress(LaunchError):
                hello = decode_as(Hello, frame)
            self._refuse(peer, hello, differing)
            return
        try:
            hello = decode_as(Hello, frame)
        except LaunchError as error:  # for example a rank of the doctor at a trainer's port
            self._refuse(peer, None, str(error))
            return
        connection = Connection(peer.outbox, hello, partial(self._send_rest, peer))
        answer = self.events.admit(connection)
        if isinstance(answer, Refused):
            self._end_refused(peer, answer)
            return
        peer.enter(PeerState.ADMITTED)
        peer.connection = connection
        self._proven.discard(peer)
        connection.send(answer)
        self.events.admitted(connection)

    def _refuse(self, peer: Peer, hello: Hello | None, reason: str) -> None:
        self._end_refused(peer, Refused(reason))
        if hello is not None:
            self.events.refused(hello, reason)
        else:
            self._note(_Notice.REFUSED, f"{reason} (from {peer.address})")

    def _end_refused(self, peer: Peer, answer: Refused) -> None:
        """Send the answer, and close the connection once the peer has had time to read it."""
        peer.enter(PeerState.REFUSED)
        self._forget_deadlines(peer)
        self._selector.unregister(peer.sock)
        if self._sent(peer, encode(answer)):
            peer.outbox.end_sending()
            self._refused.add(peer, time.monotonic())
        else:
            self._drop(peer)

    @staticmethod
    def _sent(peer: Peer, data: bytes) -> bool:
        """Send to a peer that was not admitted; whether it was sent at once, as a whole."""
        try:
            return not peer.outbox.send(data)
        except OSError:
            return False

    def _send_rest(self, peer: Peer) -> None:
        """Have this server's thread send what is still unsent; called on any thread."""
        self._have_unsent.append(peer)
        self._wake_up()

    def _await_room(self, peer: Peer) -> None:
        if peer.state is PeerState.ADMITTED and peer not in self._stalled:
            self._selector.modify(peer.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            self._stalled.add(peer, time.monotonic())

    def _write(self, peer: Peer) -> None:
        num_before = peer.outbox.num_unsent
        try:
            has_unsent = peer.outbox.flush()
        except OSError:
            self._drop(peer)
            return
        if not has_unsent:
            self._stalled.discard(peer)
            self._selector.modify(peer.sock, selectors.EVENT_READ, peer)
        elif peer.outbox.num_unsent < num_before:
            self._stalled.add(peer, time.monotonic())
