"""Attacks a join server for some seconds: attack_gate.py PORT SECONDS NUM_SILENT.

It opens NUM_SILENT connections that send nothing, and half as many that send the first part of a
large frame, and prints "silent". Then it sends noise of many kinds on others, and prints how many
these were.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import sys
import threading
import time

port, seconds, num_silent = (int(argument) for argument in sys.argv[1:])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20), hard))
rng = random.Random(7)
made: list[socket.socket] = []


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


def connected(timeout_s: float = 2) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def make_noise(deadline: float) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), connected() as sock:
            sock.sendall(rng.choice(KINDS)())
            made.append(sock)
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
