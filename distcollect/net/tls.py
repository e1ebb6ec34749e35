"""TLS 1.3 for the connections between hosts.

A certificate proves nothing here by itself: the trainer makes one for each run. Both sides put its
fingerprint, as each of them sees it, into the proofs of the handshake that follows within the
encrypted connection (:mod:`.handshake`). So nobody in between can relay that handshake: to read
along, he would have to show the joining process a certificate of his own.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from distcollect.common.memory_segment import small_file
from distcollect.common.refusing import refusing
from distcollect.errors import ArgumentError, LaunchError
from distcollect.net.framing import RECORD_BYTES, front
from distcollect.net.interfaces import is_loopback

log = logging.getLogger(__name__)

SECURITY = "DISTCOLLECT_SECURITY"
TLS, TOKEN = "tls", "token"
_CERT, _KEY, _CA = "DISTCOLLECT_TLS_CERT", "DISTCOLLECT_TLS_KEY", "DISTCOLLECT_TLS_CA"
_LIMIT_S, _DAYS = 30.0, 3650
_NAME_A_FILE = "name a file of certificates (PEM)"
# What is encrypted at once, or received at once and then decrypted: it fits into a core's cache.
_PIECE_BYTES = 256 * 1024
_FEW_BYTES = 1024  # that are received at once while TLS's own handshake goes on


class TlsSocket:
    """A socket with TLS, of which the rest of the package uses what a plain socket has too.

    What is encrypted goes through memory. So many records, each of 16 KiB at most, are sent or
    received by one call of the system, which takes more time than to copy them; and a peer that
    sends nothing but TLS's own messages can't keep the thread that reads them. OpenSSL allows one
    thread at a time to read or write.
    """

    def __init__(self, sock: Any, context: ssl.SSLContext, *, is_trainer: bool) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_trainer)
        self._unsent = memoryview(b"")  # of what is encrypted
        self._num_encrypted = 0  # the bytes that this was
        for name in ("fileno", "settimeout", "setblocking", "shutdown", "close"):
            setattr(self, name, getattr(sock, name))

    def do_handshake(self) -> None:
        """Go on with TLS's own handshake.

        Raises:
            BlockingIOError: the peer has to go on first, also if the socket blocks.
            OSError: it failed.
        """
        with self._lock:
            self._do(_FEW_BYTES, self._shake_hands)

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        finally:
            self._sock.sendall(self._outgoing.read())  # also why it failed

    def _do(self, most_bytes: int, work: Callable[..., Any], *args: Any) -> Any:
        """Do what may need bytes of the peer; receive them only once."""
        with contextlib.suppress(ssl.SSLWantReadError):
            return work(*args)
        self._receive(most_bytes)
        with contextlib.suppress(ssl.SSLWantReadError):
            return work(*args)
        raise BlockingIOError("the peer has to send more")

    def _receive(self, most_bytes: int) -> None:
        """Receive what is to be decrypted, if it is there."""
        with contextlib.suppress(BlockingIOError):
            data = self._sock.recv(most_bytes)
            # The end is told by what reads, after what came before it.
            self._incoming.write(data) if data else self._incoming.write_eof()

    @property
    def fingerprint(self) -> bytes:
        """The peer's certificate, see :func:`fingerprint_of`."""
        return fingerprint_of(self._tls.getpeercert(binary_form=True) or b"")

    def pending(self) -> int:
        """Bytes that were received, encrypted or not, and that no select() tells of any more."""
        with self._lock:
            return self._tls.pending() + self._incoming.pending

    def recv(self, num_bytes: int) -> bytes:
        """Receive, of what is encrypted no more than so much either.

        Raises:
            BlockingIOError: there is nothing to read yet, also if the socket blocks.
        """
        with self._lock:
            return bytes(self._do(num_bytes, self._tls.read, num_bytes))

    def recvmsg_into(self, buffers: Iterable[memoryview]) -> tuple[int]:
        """Receive what has come, as far as there is room; the socket must not block."""
        num_bytes, read = 0, self._tls.read
        with self._lock, contextlib.suppress(ssl.SSLWantReadError):
            for buffer in buffers:
                rest = buffer
                while rest:
                    if self._incoming.pending < RECORD_BYTES:
                        self._receive(_PIECE_BYTES)
                    if not (num_read := int(read(len(rest), rest))):
                        return (num_bytes,)
                    num_bytes += num_read
                    rest = rest[num_read:]
        if not num_bytes:
            raise BlockingIOError("the peer has to send more")
        return (num_bytes,)

    def sendmsg(self, buffers: Iterable[memoryview]) -> int:
        """Send of the buffers; after a BlockingIOError they have to be the same again."""
        with self._lock:
            if not self._unsent:
                self._num_encrypted = 0
                for piece in front(buffers, _PIECE_BYTES):
                    num_written = self._tls.write(piece)
                    self._num_encrypted += num_written
                    if num_written < len(piece):  # as its documentation allows
                        break
                self._unsent = memoryview(self._outgoing.read())
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            return self._num_encrypted


class TrainerTls(NamedTuple):
    """What a trainer needs for TLS.

    Attributes:
        context: has its certificate.
        fingerprint: of that certificate, see :func:`fingerprint_of`.
    """

    context: ssl.SSLContext
    fingerprint: bytes


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def check_security(security: str | None) -> str | None:
    """Return what is wanted: :data:`TLS`, :data:`TOKEN`, or None, which is TLS between hosts.

    Args:
        security: of the user; None: what the environment says.

    Raises:
        ArgumentError: it is something else.
    """
    wanted = security or os.environ.get(SECURITY) or None
    if wanted not in (None, TLS, TOKEN):
        name = f"security={security!r}" if security else f"{SECURITY}={wanted!r}"
        raise ArgumentError(f"{name}: must be {TLS!r} or {TOKEN!r}")
    return wanted


def trainer_tls(address: str, security: str | None = None) -> TrainerTls | None:
    """Return what a trainer needs that listens on ``address``; None: it uses no TLS.

    Args:
        address: of this host.
        security: see :func:`check_security`.

    Raises:
        ArgumentError: see :func:`check_security`.
        LaunchError: TLS is wanted, and there is no certificate that could be used.
    """
    wanted = check_security(security)
    if wanted is None and is_loopback(address):
        return None
    if wanted == TOKEN:
        if not is_loopback(address):
            log.warning(
                "security='token': what goes over the network is not encrypted, and who can change "
                "it can take over the run; 'tls' protects it"
            )
        return None
    try:
        return _own_tls() if _CERT in os.environ else _made_tls()
    except (OSError, ValueError) as error:
        if wanted is None and _CERT not in os.environ:
            log.warning("connections between hosts are not encrypted: %s", error)
            return None
        raise LaunchError(
            f"no TLS: {error}. Name a certificate by {_CERT} and {_KEY}, or do without by "
            f"{SECURITY}={TOKEN}"
        ) from error


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _trainer_context(cert: str, key: str, text: str) -> TrainerTls:
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no connection is resumed
    context.load_cert_chain(cert, key)
    begin = text.index("-----BEGIN CERTIFICATE-----")
    end = "-----END CERTIFICATE-----"
    first = text[begin : text.index(end, begin) + len(end)]
    return TrainerTls(context, fingerprint_of(ssl.PEM_cert_to_DER_cert(first)))


def _own_tls() -> TrainerTls:
    """Use the user's certificate."""
    cert, key = os.environ[_CERT], os.environ.get(_KEY) or os.environ[_CERT]
    return _trainer_context(cert, key, Path(cert).read_text())


def _made_tls() -> TrainerTls:
    """Make a certificate for this run; its key gets no path on a disk."""
    pem = _made_certificate()
    with small_file() as file:
        file.write(pem)
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        return _trainer_context(path, path, pem.decode())


def _made_certificate() -> bytes:
    """Return a new key and certificate for it, as PEM.

    Raises:
        OSError: there is neither cryptography nor openssl here.
    """
    try:
        from cryptography import x509  # noqa: PLC0415 - it is optional
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError:
        return _made_by_openssl()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distcollect")])
    now, day = dt.datetime.now(dt.timezone.utc), dt.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - day).not_valid_after(now + _DAYS * day)
    pem = serialization.Encoding.PEM
    private: bytes = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))


def _made_by_openssl() -> bytes:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    command += f" -keyout /dev/stdout -subj /CN=distcollect -days {_DAYS}"
    try:
        made = subprocess.run(command.split(), capture_output=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise OSError(f"a certificate needs package cryptography, or openssl ({error})") from error
    return made.stdout


def is_required() -> bool:
    """Return True if the user wants this process to join over TLS only."""
    return _CA in os.environ or check_security(None) == TLS


def joining_tls(sock: Any, deadline: float) -> TlsSocket:
    """Return the socket of a process that joins with TLS; ``deadline``: of ``time.monotonic``.

    Raises:
        ArgumentError: the file of the authority that the user named can't be read.
        LaunchError: the trainer's certificate is not of that authority.
        OSError: the handshake failed.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the proofs show which trainer it is
    context.verify_mode = ssl.CERT_NONE
    if authority := os.environ.get(_CA):
        context.verify_mode = ssl.CERT_REQUIRED
        # Read here, as this error names the file; what stands beside certificates is ignored.
        with refusing(f"{_CA}={authority} can't be used", _NAME_A_FILE, (OSError, ValueError)):
            context.load_verify_locations(cadata=Path(authority).read_text("ascii", "ignore"))
    secured = TlsSocket(sock, context, is_trainer=False)
    try:
        while True:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("TLS's handshake took too long")
            sock.settimeout(left_s)
            with contextlib.suppress(BlockingIOError):
                secured.do_handshake()
                return secured
    except ssl.SSLCertVerificationError as error:
        raise LaunchError(f"its certificate is refused ({_CA}={authority}): {error}") from error
