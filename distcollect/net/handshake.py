"""The handshake that begins a control connection: both sides prove that they know the token.

::

    joining process                         trainer
    Opening: versions, nonce ─────────▶
                             ◀─────────     Challenge: versions, nonce
    Proof                    ─────────▶
                             ◀─────────     Proof, or Refused

If the trainer uses TLS, it answers the first Opening by StartTls, and both begin again within TLS.

The token itself is never sent. A :class:`Proof` is an HMAC-SHA256 whose key is the token, over the
role of the side that proves, and the bytes of the Opening and the Challenge. So a proof holds

- for this connection only: each side's nonce is random, and both are in it (no replay);
- for one side only: the roles differ (no reflection);
- for what both sides have seen: nobody in between has changed a version or a nonce;
- within TLS, for the trainer's certificate, whose fingerprint is in it too: nobody in between has
  shown the joining process another one, to relay the rest.

The joining process proves first. A stranger who connects to the trainer gets nothing that depends
on the token; one who listens at the trainer's address gets a proof that only helps to test guesses
of the token.

This is the three-pass mutual authentication of ISO/IEC 9798-4, which is SKID3 in the Handbook of
Applied Cryptography (Menezes, van Oorschot, Vanstone; 10.3.2), after an Opening that the versions
travel in. Nothing here uses a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from distcollect.errors import LaunchError
from distcollect.net.framing import with_length
from distcollect.net.messages import Message, decode_as, to_bytes, versions

_NUM_NONCE_BYTES = 32
_JOINS, _TRAINS = b"distcollect: a process joins", b"distcollect: the trainer answers"

UNPROVEN = (
    "it doesn't have this run's token: DISTCOLLECT_TOKEN_FILE has to name a file with the same "
    "secret there and here"
)


def _nonce() -> str:
    return secrets.token_hex(_NUM_NONCE_BYTES)


# These messages stay the same from one protocol version to the next: so that two processes
# can tell each other that their versions differ.


@dataclass(frozen=True)
class Opening(Message):
    """The first message of a process that joins."""

    versions: dict[str, str] = field(default_factory=versions)
    nonce: str = field(default_factory=_nonce)


@dataclass(frozen=True)
class Challenge(Message):
    """The trainer's answer to an :class:`Opening`."""

    versions: dict[str, str] = field(default_factory=versions)
    nonce: str = field(default_factory=_nonce)


@dataclass(frozen=True)
class StartTls(Message):
    """The trainer's other answer: what follows is encrypted."""


@dataclass(frozen=True)
class Proof(Message):
    """Shows that a side knows the token; ``mac`` is in hexadecimal digits."""

    mac: str


class NotProven(LaunchError):
    """The other side did not show that it knows the token."""


class _Side:
    """What both sides of the handshake do in the same way."""

    def __init__(self, token: str, fingerprint: bytes = b"") -> None:
        """``fingerprint``: of the certificate that the trainer showed, if it did."""
        self._token = token
        self._fingerprint = fingerprint
        self.opening = self._challenge = b""

    def _mac(self, role: bytes) -> str:
        key = self._token.encode(errors="surrogatepass")
        parts = (role, self.opening, self._challenge, self._fingerprint)
        # With their lengths, so that different parts never make the same text.
        text = b"".join(map(with_length, filter(None, parts)))
        return hmac.new(key, text, hashlib.sha256).hexdigest()

    def _proof(self, role: bytes) -> bytes:
        return to_bytes(Proof(self._mac(role)))

    def _is_proof(self, data: bytes, role: bytes) -> bool:
        proof = decode_as(Proof, data)
        mac = proof.mac.encode(errors="surrogatepass")
        return hmac.compare_digest(mac, self._mac(role).encode())


class JoiningSide(_Side):
    """The handshake of a process that joins.

    Attributes:
        opening: the first frame to send.
    """

    def __init__(self, token: str, fingerprint: bytes = b"") -> None:
        super().__init__(token, fingerprint)
        self.opening = to_bytes(Opening())

    def prove(self, challenge: bytes) -> bytes:
        """Return the frame that answers the trainer's first one.

        Raises:
            LaunchError: it is no challenge.
        """
        decode_as(Challenge, challenge)
        self._challenge = challenge
        return self._proof(_JOINS)

    def verify(self, proof: bytes) -> None:
        """Check the trainer's second frame.

        Raises:
            NotProven: the sender does not know the token.
            LaunchError: it is no proof.
        """
        if not self._is_proof(proof, _TRAINS):
            raise NotProven("it doesn't know this run's token")


class TrainerSide(_Side):
    """The trainer's handshake with one process that joins.

    Attributes:
        is_proven: whether the process has shown that it knows the token.
        opening: the first frame of the process; empty before it came.
        versions: of the process, as it said; once its first frame came.
    """

    is_proven = False
    versions: dict[str, str]

    def answer(self, data: bytes) -> bytes:
        """Return the frame that answers a frame of the process.

        Raises:
            LaunchError: the process is not part of distcollect, or does not know the token.
        """
        if not self.opening:
            self.versions = decode_as(Opening, data).versions
            self.opening, self._challenge = data, to_bytes(Challenge())
            return self._challenge
        if not self._is_proof(data, _JOINS):
            raise LaunchError("its proof was made with another one")
        self.is_proven = True
        return self._proof(_TRAINS)


def differing_versions(theirs: dict[str, str]) -> str:
    """Say which versions of a process that joins differ from ours; "" if none does."""
    differing = ", ".join(
        f"its {name} is {printable(theirs.get(name, 'unknown')[:20])}, the trainer's is {version}"
        for name, version in versions().items()
        if theirs.get(name) != version
    )
    return f"{differing}; install the same on all hosts" if differing else ""


def printable(text: str) -> str:
    """Make a text from a process that has proven nothing safe for a terminal and for a log."""
    return "".join(c if c.isprintable() else "?" for c in text)
