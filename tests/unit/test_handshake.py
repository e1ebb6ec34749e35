"""The join handshake proves the token to both sides, and nothing else does. Without sockets."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distcollect.errors import LaunchError
from distcollect.net.handshake import (
    Challenge,
    JoiningSide,
    NotProven,
    Opening,
    TrainerSide,
    differing_versions,
)
from distcollect.net.messages import WorkerHello, encode, to_bytes

CASES = settings(max_examples=10 * settings.default.max_examples)
TOKEN = "e9d1a2-nobody-may-see-this"


@CASES
@given(st.integers(0, 4), st.integers(0, 2**16), st.integers(1, 255))
def test_a_change_of_any_byte_on_the_way_is_noticed(which: int, where: int, mask: int) -> None:
    """By one side or the other: nobody is admitted over a connection that somebody changes."""

    def passed(number: int, frame: bytes) -> bytes:
        if number != which:
            return frame
        changed = bytearray(frame)
        changed[where % len(frame)] ^= mask
        # Another kind of white space in a proof changes nothing that it says.
        assume(number < 2 or bytes(changed).split() != frame.split())
        return bytes(changed)

    def run() -> None:
        challenge = passed(1, trainer.answer(passed(0, joining.opening)))
        proof = trainer.answer(passed(2, joining.prove(challenge)))
        assert which >= 3  # else the trainer has noticed
        joining.verify(passed(3, proof))

    joining, trainer = JoiningSide(TOKEN), TrainerSide(TOKEN)
    with contextlib.nullcontext() if which == 4 else pytest.raises(LaunchError):
        run()
    assert trainer.is_proven == (which >= 3)


@CASES
@given(st.text(max_size=40), st.text(max_size=40))
def test_the_token_is_proven_and_never_sent(token: str, other: str) -> None:
    """Whether the other side knows it or not; nor is it in what follows."""
    joining, trainer = JoiningSide(TOKEN + token), TrainerSide(TOKEN + other)
    challenge = trainer.answer(joining.opening)
    sent = [joining.opening, challenge, joining.prove(challenge)]
    with contextlib.suppress(LaunchError):
        sent.append(trainer.answer(sent[-1]))
    assert trainer.is_proven == (len(sent) == 4) == (token == other)
    sent.append(encode(WorkerHello(worker_id=0, incarnation=0)))
    assert TOKEN[:6].encode() not in b"".join(sent)


def test_a_proof_is_for_one_connection_and_one_side() -> None:
    joining, trainer = JoiningSide(TOKEN), TrainerSide(TOKEN)
    proof = joining.prove(trainer.answer(joining.opening))
    trainers_proof = trainer.answer(proof)
    again, other = TrainerSide(TOKEN), JoiningSide(TOKEN)
    again.answer(joining.opening)
    with pytest.raises(LaunchError):
        again.answer(proof)
    own = other.prove(to_bytes(Challenge()))
    for recorded in (trainers_proof, own):
        with pytest.raises(NotProven):
            other.verify(recorded)


def test_the_end_of_one_part_is_not_the_begin_of_the_next() -> None:
    """Two openings and challenges that make the same text together."""
    joining = JoiningSide(TOKEN)
    first = joining.prove(to_bytes(Challenge(nonce="1")))
    joining.opening += b" "
    assert joining.prove(to_bytes(Challenge(nonce="1"))) != first


def test_nonces_differ() -> None:
    nonces = {message.nonce for _ in range(50) for message in (Opening(), Challenge())}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {64}


@CASES
@given(st.text())
def test_versions_of_any_kind_are_told_safely(theirs: str) -> None:
    words = differing_versions({"protocol": theirs})
    assert "the trainer's is 3" in words
    assert words.isprintable()
    assert len(words) < 400
