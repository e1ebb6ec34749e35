"""The join handshake proves the token to both sides, and nothing else does. Without sockets."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distcollect.errors import LaunchError
from distcollect.net.framing import FrameReader, with_length
from distcollect.net.handshake import (
    Challenge,
    JoiningSide,
    NotProven,
    Opening,
    Proof,
    TrainerSide,
    differing_versions,
    to_bytes,
)
from distcollect.net.messages import WorkerHello, encode, versions

TOKENS = st.text(max_size=40)
CASES = settings(max_examples=10 * settings.default.max_examples)


def run(joining: JoiningSide, trainer: TrainerSide) -> None:
    challenge = trainer.answer(joining.opening)
    joining.verify(trainer.answer(joining.prove(challenge)))


@CASES
@given(TOKENS)
def test_two_that_know_the_token_prove_it(token: str) -> None:
    joining, trainer = JoiningSide(token), TrainerSide(token)
    assert not trainer.is_proven
    run(joining, trainer)
    assert trainer.is_proven
    assert trainer.versions == versions()


@CASES
@given(TOKENS, TOKENS)
def test_another_token_proves_nothing(one: str, other: str) -> None:
    trainer = TrainerSide(one)
    if one == other:
        return
    with pytest.raises(NotProven, match="token"):
        run(JoiningSide(other), trainer)
    assert not trainer.is_proven


@CASES
@given(st.integers(0, 3), st.integers(0, 2**16), st.integers(1, 255))
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

    def run_changed() -> None:
        challenge = passed(1, trainer.answer(passed(0, joining.opening)))
        proof = trainer.answer(passed(2, joining.prove(challenge)))
        assert which == 3  # else the trainer has noticed
        joining.verify(passed(3, proof))

    joining, trainer = JoiningSide("a token"), TrainerSide("a token")
    with pytest.raises(LaunchError):
        run_changed()


@CASES
@given(st.binary(max_size=300), st.booleans())
def test_noise_proves_nothing(noise: bytes, opened: bool) -> None:
    trainer = TrainerSide("a token")
    if opened:
        trainer.answer(JoiningSide("a token").opening)
    with pytest.raises(LaunchError):
        trainer.answer(noise)
    assert not trainer.is_proven
    joining = JoiningSide("a token")
    with pytest.raises(LaunchError):
        joining.verify(noise)
    with pytest.raises(LaunchError):
        joining.prove(noise)


@pytest.mark.parametrize("token", ["e9d1a2-nobody-may-see-this", "another"])
def test_the_token_is_never_sent(token: str) -> None:
    """Whether the other side knows it or not; nor is it in what follows."""
    joining, trainer = JoiningSide("e9d1a2-nobody-may-see-this"), TrainerSide(token)
    challenge = trainer.answer(joining.opening)
    sent = [joining.opening, challenge, joining.prove(challenge)]
    with contextlib.suppress(NotProven):
        sent.append(trainer.answer(sent[-1]))
    sent.append(encode(WorkerHello(worker_id=0, incarnation=0)))
    assert b"e9d1a2" not in b"".join(sent)


def test_a_recorded_handshake_is_worth_nothing() -> None:
    joining, trainer = JoiningSide("a token"), TrainerSide("a token")
    proof = joining.prove(trainer.answer(joining.opening))
    trainers_proof = trainer.answer(proof)

    again = TrainerSide("a token")
    again.answer(joining.opening)
    with pytest.raises(NotProven):
        again.answer(proof)
    other = JoiningSide("a token")
    other.prove(to_bytes(Challenge()))
    with pytest.raises(NotProven):
        other.verify(trainers_proof)


def test_a_side_does_not_prove_for_the_other() -> None:
    """A stranger sends a process its own proof, or the trainer's proof to the trainer."""
    joining = JoiningSide("a token")
    challenge = to_bytes(Challenge())
    own = joining.prove(challenge)
    with pytest.raises(NotProven):
        joining.verify(own)
    # The trainer proves nothing before the other side has; so no answer of it can be sent back.
    trainer = TrainerSide("a token")
    answer = trainer.answer(joining.opening)
    assert json.loads(answer).keys() == {"message", "versions", "nonce"}
    with pytest.raises(LaunchError):
        trainer.answer(answer)


def test_the_end_of_one_part_is_not_the_begin_of_the_next() -> None:
    """Two openings and challenges that make the same text together."""
    joining = JoiningSide("a token")
    first = joining.prove(to_bytes(Challenge(nonce="1")))
    joining.opening += b" "
    assert joining.prove(to_bytes(Challenge(nonce="1"))) != first


def test_nonces_differ() -> None:
    nonces = {message.nonce for _ in range(50) for message in (Opening(), Challenge())}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {64}


@CASES
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_versions_of_any_kind_are_told_safely(theirs: object) -> None:
    words = differing_versions({"protocol": theirs})
    assert "the trainer's is 3" in words or theirs == "3"
    assert words.isprintable()
    assert len(words) < 400


def test_a_proof_that_is_no_text() -> None:
    trainer = TrainerSide("a token")
    trainer.answer(JoiningSide("a token").opening)
    with pytest.raises(NotProven):
        trainer.answer(to_bytes(Proof("\ud800")))


@CASES
@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(1, 30)))
def test_frames_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(with_length(frame) for frame in frames)
    reader, found = FrameReader(), []
    for size in [*cuts, len(data)]:
        piece, data = data[:size], data[size:]
        reader.feed(piece)
        while (frame := reader.next()) is not None:
            found.append(frame)
    assert found == frames


def test_a_longer_frame_than_allowed_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(max_frame=10)
    reader.feed(with_length(bytes(10)))
    assert reader.next() == bytes(10)
    reader.feed(with_length(bytes(11))[:4])
    with pytest.raises(LaunchError, match="11 bytes"):
        reader.next()
