"""Attacks a join server for some seconds: attack_gate.py PORT SECONDS NUM_SILENT [tls].

It opens NUM_SILENT connections that send nothing, and half as many that send the first part of a
large frame, and prints "silent". Then it sends noise of many kinds on others, and prints how many
these were. With "tls", half of them begin as a server with TLS wants it.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import ssl
import struct
import sys
import threading
import time

from distcollect.errors import LaunchError
from distcollect.net.framing import with_length
from distcollect.net.handshake import JoiningSide

port, seconds, num_silent = (int(argument) for argument in sys.argv[1:4])
uses_tls = sys.argv[4:] == ["tls"]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20), hard))
rng = random.Random(7)
made: list[socket.socket] = []
FEWEST = 100


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


OPENING = framed(b'{"message": "Opening", "versions": {"protocol": "3"}, "nonce": "00"}')
KINDS = [
    lambda: rng.randbytes(rng.randrange(2000)),
    lambda: framed(b"{}") * 10_000,
    lambda: framed(rng.randbytes(100)),
    lambda: struct.pack("!I", 1 << 20) + b" " * 100_000,
    lambda: OPENING[: rng.randrange(len(OPENING))],
    lambda: OPENING + framed(b'{"message": "Proof", "mac": "00"}'),
    lambda: OPENING * 50,
    lambda: b"GET / HTTP/1.1\r\n\r\n",
]


def begin_tls(sock: socket.socket) -> None:
    """Begin as a process that joins, and go wrong then."""
    sock.sendall(with_length(JoiningSide("another token").opening))
    sock.recv(1000)  # that TLS is to begin
    kind = rng.randrange(4)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kind == 0:
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    elif kind == 1:
        hello = ssl.MemoryBIO()
        half = context.wrap_bio(ssl.MemoryBIO(), hello)
        with contextlib.suppress(ssl.SSLWantReadError):
            half.do_handshake()
        sock.sendall(hello.read()[: rng.randrange(1, 200)])
        return
    with context.wrap_socket(sock) as secured:
        if kind == 2:
            side = JoiningSide("another token", secured.getpeercert(binary_form=True) or b"")
            secured.sendall(with_length(side.opening))
            secured.sendall(with_length(side.prove(secured.recv(1000)[4:])))
            secured.recv(1000)
        else:
            secured.sendall(rng.choice(KINDS)())


def connected(timeout_s: float = 2) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def make_noise(deadline: float) -> None:
    # On a busy machine few are accepted per second.
    while (now := time.monotonic()) < deadline or (len(made) <= FEWEST and now < deadline + 60):
        with contextlib.suppress(OSError, ValueError, LaunchError), connected() as sock:
            made.append(sock)
            if uses_tls and rng.random() < 0.5:
                begin_tls(sock)
                continue
            sock.sendall(rng.choice(KINDS)())
            if rng.random() < 0.3:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif rng.random() < 0.3:
                sock.recv(100)


# These have to stand, however busy the machine is.
silent = [connected(60) for _ in range(num_silent)]
begun = [connected(60) for _ in range(num_silent // 2)]
for sock in begun:
    with contextlib.suppress(OSError):
        sock.sendall(struct.pack("!I", 1 << 20) + bytes(200_000))
print("silent", flush=True)
until = time.monotonic() + seconds
threads = [threading.Thread(target=make_noise, args=(until,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(made), flush=True)
