"""What goes over a connection: frames, the bytes still to be sent, socket options.

A frame is a word of four bytes, its kind and its length, then as many bytes. Its kind says what
these are:

=========  ================================================================================
MESSAGE    a message, see :mod:`.messages`
PACKET     a number of eight bytes, then the only part of a :class:`Packet`
HEAD       a number, then the sizes of the parts of a large packet, eight bytes each
CHUNK      the next bytes of the parts of the first large packet that is not complete
=========  ================================================================================

A large packet is cut into chunks, and small frames go in between: they never wait for more than a
chunk. Its parts are sent from where they lie, and received where they are to lie.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from distcollect.errors import LaunchError

_WORD = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_LENGTH_BITS = 24
MAX_FRAME = 1 << 20  # bytes; what a peer without the token may send is far less
# Above, a packet is large. 512 KiB take 5 ms on a network of 1 Gbit/s.
_CHUNK = 512 * 1024 - _WORD.size
# A connection with more to send lets others have their turn after so many chunks.
_CHUNKS_AT_ONCE = 8
_MAX_VIEWS = 64  # that are sent or received by one call
_READ_BYTES, RECORD_BYTES = 65536, 16_640  # the second is the most that a record of TLS has
_TCP_RTO_MAX_MS = 44  # in linux/tcp.h

Buffer: TypeAlias = Any  # bytes, or what a memoryview can be made of


class Kind(enum.IntEnum):
    """What a frame has in it."""

    MESSAGE = 0
    PACKET = 1
    HEAD = 2
    CHUNK = 3


class Packet(NamedTuple):
    """Some buffers that belong together, and a number that means something to both ends."""

    number: int
    parts: Sequence[Buffer]


open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child (a DataLoader's, an AsyncVectorEnv's) that kept these sockets open would hide
    # this process's end from the other side.
    for sock in list(open_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def configure_socket(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer that has gone silent."""
    open_sockets.add(sock)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes closes nothing; the kernel's probes find that in 10 s. They begin early
    # and are close together, so that one gets through after a network stood still for 5 s.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 8),
        (socket.TCP_USER_TIMEOUT, 10_000),  # in ms: the same while sent data is not acknowledged
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    # After a network stood still for 5 s, TCP would try again only at 6 s, or at 12 s.
    with contextlib.suppress(OSError):  # before Linux 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def with_length(data: bytes, kind: Kind = Kind.MESSAGE) -> bytes:
    """Return the bytes of a frame, after their kind and length."""
    return _word(kind, len(data)) + data


def _word(kind: Kind, length: int) -> bytes:
    return _WORD.pack(kind << _LENGTH_BITS | length)


class PacketReceiver(Protocol):
    """What a connection's packets are for. It is called on the thread that reads them."""

    def allocate(self, num_bytes: int) -> Buffer:
        """Make memory for a part of a large packet."""

    def received(self, packet: Packet) -> None:
        """Handle a packet."""

    def ended(self) -> None:
        """Note that no more packets come, and none can be sent."""


class _Incoming(NamedTuple):
    """A large packet that comes in chunks.

    Attributes:
        packet: its parts are filled one after the other.
        empty: what is left of these; first of the one that is being filled.
    """

    packet: Packet
    empty: deque[memoryview]


class FrameReader:
    """Puts frames together from the pieces that arrive.

    Attributes:
        max_frame: the most bytes that a frame may have, without its word.
        allocate: makes the memory for a part of a large packet; None: the peer may send no packets.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self.allocate: Callable[[int], Buffer] | None = None
        self._buffer = bytearray()
        self._incoming: deque[_Incoming] = deque()
        self._chunk_rest = 0  # bytes of the present chunk that have not come

    @property
    def is_in_packet(self) -> bool:
        """Return True if the rest of a large packet is on its way."""
        return bool(self._incoming)

    def receive(self, sock: Any) -> bool:
        """Read from a socket once; return False if the peer has closed it.

        Raises:
            OSError: nothing is there, or the connection is broken.
        """
        if self._chunk_rest:
            views = front(self._incoming[0].empty, self._chunk_rest)
            num_bytes: int = sock.recvmsg_into(views)[0]
            self._filled(num_bytes)
            return num_bytes > 0
        # Little of what belongs to a large packet is to be read into this buffer first; and little
        # at once of a peer without a proof, as TLS's own messages take long for their size.
        data = sock.recv(RECORD_BYTES if self._incoming else min(_READ_BYTES, self.max_frame // 4))
        self.feed(data)
        return bool(data)

    def feed(self, data: bytes) -> None:
        self._buffer += data  # without a copy of what is there already

    def next(self) -> bytes | Packet | None:
        """Return the next message's bytes, or the next packet; None until there is a whole one.

        Raises:
            LaunchError: the frame is longer than ``max_frame``, or makes no sense.
        """
        while not self._chunk_rest:
            if self._incoming and not self._incoming[0].empty:
                return self._incoming.popleft().packet
            if len(self._buffer) < _WORD.size:
                return None
            (word,) = _WORD.unpack_from(self._buffer)
            kind, length = divmod(word, 1 << _LENGTH_BITS)
            if length > self.max_frame or (kind and self.allocate is None) or kind > Kind.CHUNK:
                raise LaunchError(f"a frame of {word} bytes: the peer is not part of distcollect")
            if kind == Kind.CHUNK:
                self._begin_chunk(length)
                continue
            end = _WORD.size + length
            if len(self._buffer) < end:
                return None
            data = bytes(self._buffer[_WORD.size : end])
            del self._buffer[:end]
            if kind == Kind.MESSAGE:
                return data
            if length < _NUMBER.size or (kind == Kind.HEAD and length % _NUMBER.size):
                raise LaunchError(f"a frame of kind {kind} with {length} bytes")
            (number,) = _NUMBER.unpack_from(data)
            if kind == Kind.PACKET:
                return Packet(number, [memoryview(data)[_NUMBER.size :]])
            assert self.allocate is not None
            parts = [self.allocate(size) for (size,) in _NUMBER.iter_unpack(data[_NUMBER.size :])]
            self._incoming.append(_Incoming(Packet(number, parts), _views(parts)))
        return None

    def _begin_chunk(self, length: int) -> None:
        if not (self._incoming and 0 < length <= sum(map(len, self._incoming[0].empty))):
            raise LaunchError(f"a chunk of {length} bytes that belongs to no packet")
        self._chunk_rest = length
        del self._buffer[: _WORD.size]
        while self._buffer and self._chunk_rest:
            space = self._incoming[0].empty[0]
            num_bytes = min(len(space), len(self._buffer), self._chunk_rest)
            space[:num_bytes] = self._buffer[:num_bytes]
            del self._buffer[:num_bytes]
            self._filled(num_bytes)

    def _filled(self, num_bytes: int) -> None:
        _advance(self._incoming[0].empty, num_bytes)
        self._chunk_rest -= num_bytes


def _views(parts: Sequence[Buffer]) -> deque[memoryview]:
    return deque(memoryview(part).cast("B") for part in parts if len(part))


def front(views: Iterable[memoryview], num_bytes: int) -> list[memoryview]:
    """Return so many bytes from the front of ``views``, or fewer if these are too many views."""
    found: list[memoryview] = []
    for view in itertools.islice(views, _MAX_VIEWS):
        found.append(view[:num_bytes])
        num_bytes -= len(found[-1])
        if not num_bytes:
            break
    return found


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    """Drop so many bytes from the front of ``views``."""
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views.popleft())
    if num_bytes:
        views[0] = views[0][num_bytes:]


class Outbox:
    """Sends frames in their order, and keeps what the peer does not take yet.

    Large packets are sent in chunks, in their order, and after all other frames that are there. Any
    thread may use it. On a socket that blocks, nothing is ever kept.
    """

    def __init__(self, sock: Any, max_unsent: int) -> None:
        """``max_unsent``: the most bytes to keep, without the parts of large packets."""
        self._sock = sock
        self._max_unsent = max_unsent
        self._lock = threading.Lock()
        self._unsent = bytearray()  # whole frames
        self._large: deque[deque[memoryview]] = deque()  # of each packet, what was not cut yet
        self._current: deque[memoryview] = deque()  # what is sent next, and can't be put off
        self._ended = False

    @property
    def num_unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        with self._lock:
            views = itertools.chain(self._current, *self._large)
            return len(self._unsent) + sum(map(len, views))

    def send(self, data: bytes = b"") -> bool:
        """Send, or keep what can't be sent now; without data, try again to send what is kept.

        Returns:
            Whether the peer still has to take something, so that this is to be called again.

        Raises:
            OSError: the connection has ended, or the peer would have to take more than
                ``max_unsent`` bytes later. To be followed by :meth:`end` or :meth:`close`.
        """
        return self._send(data, ())

    def send_packet(self, packet: Packet) -> bool:
        """The same for a packet; its parts must not change before the peer has them."""
        number, parts = packet
        sizes = [memoryview(part).nbytes for part in parts]
        if len(parts) == 1 and sizes[0] <= _CHUNK:
            return self._send(with_length(_NUMBER.pack(number) + parts[0], Kind.PACKET), ())
        head = b"".join(map(_NUMBER.pack, [number, *sizes]))
        return self._send(with_length(head, Kind.HEAD), parts)

    def _send(self, data: bytes, parts: Sequence[Buffer]) -> bool:
        with self._lock:
            if self._ended:
                raise OSError("the connection has ended")
            self._unsent += data
            if views := _views(parts):
                self._large.append(views)
            num_chunks = 0
            with contextlib.suppress(BlockingIOError):
                while num_chunks < _CHUNKS_AT_ONCE:
                    if not self._current:
                        if self._unsent:
                            self._current.append(memoryview(bytes(self._unsent)))
                            self._unsent.clear()
                        if self._large:
                            self._cut_chunk()
                            num_chunks += 1
                        if not self._current:
                            return False
                    _advance(self._current, self._sock.sendmsg(self._current))
            if len(self._unsent) > self._max_unsent:
                raise OSError(f"the peer did not take {len(self._unsent)} bytes")
            return bool(self._current or self._unsent or self._large)

    def _cut_chunk(self) -> None:
        """Move the next chunk of a large packet to what is sent next."""
        views = front(self._large[0], _CHUNK)
        num_bytes = sum(map(len, views))
        _advance(self._large[0], num_bytes)
        if not self._large[0]:
            self._large.popleft()
        self._current.append(memoryview(_word(Kind.CHUNK, num_bytes)))
        self._current.extend(views)

    def end(self) -> None:
        """End the connection both ways; what is unsent is dropped.

        The socket stays open until :meth:`close`.
        """
        with self._lock, contextlib.suppress(OSError):  # closed already
            self._drop_unsent()
            self._sock.shutdown(socket.SHUT_RDWR)

    def end_sending(self) -> None:
        """Tell the peer that nothing more will come."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        with self._lock:  # no other thread may be sending: the descriptor can be reused at once
            self._drop_unsent()
            self._sock.close()

    def _drop_unsent(self) -> None:
        self._ended = True
        for kept in (self._unsent, self._large, self._current):
            kept.clear()
