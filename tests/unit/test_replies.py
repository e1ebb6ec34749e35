"""Replies: what is called when they come, on which thread, and how often."""

from __future__ import annotations

import logging
import threading

import pytest

from distcollect.common.replies import Reply


def test_callbacks_are_called_in_their_order_once_it_is_there() -> None:
    reply: Reply[int] = Reply()
    called: list[tuple[str, int]] = []
    reply.add_done_callback(lambda it: called.append(("first", it.result())))
    reply.add_done_callback(lambda it: called.append(("second", it.result())))
    assert (called, reply.done()) == ([], False)
    reply.set_result(7)
    assert called == [("first", 7), ("second", 7)]
    reply.add_done_callback(lambda it: called.append(("late", it.result())))
    assert called[2:] == [("late", 7)]
    assert reply.done()
    assert reply.exception() is None


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    reply: Reply[int] = Reply()
    reply.set_exception(ValueError("no"))
    assert isinstance(reply.exception(), ValueError)
    with pytest.raises(ValueError, match="no"):
        reply.result()


def test_it_is_answered_once() -> None:
    reply = Reply.of(1)
    with pytest.raises(RuntimeError, match="answered before"):
        reply.set_result(2)
    with pytest.raises(RuntimeError, match="answered before"):
        reply.set_exception(ValueError())
    assert reply.result() == 1


def test_waiting_ends_at_the_limit_or_when_it_is_there() -> None:
    reply: Reply[int] = Reply()
    with pytest.raises(TimeoutError, match=r"no reply within 0\.01 s"):
        reply.result(0.01)
    threading.Timer(0.05, reply.set_result, (3,)).start()
    assert reply.result(60) == 3


def test_what_comes_then_may_raise_and_hinders_no_callback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply: Reply[int] = Reply()
    called: list[object] = []
    reply.then(lambda *_: 1 // 0, None)
    reply.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        reply.set_result(1)
    reply.add_done_callback(called.append)
    assert called == [reply, reply]
    assert "ZeroDivisionError" in caplog.text


def test_what_comes_then_is_called_once_however_threads_interleave() -> None:
    called: list[int] = []
    replies: list[Reply[int]] = [Reply() for _ in range(20_000)]

    def answer() -> None:
        for reply in replies:
            reply.set_result(0)

    thread = threading.Thread(target=answer)
    thread.start()
    for number, reply in enumerate(replies):
        reply.then(lambda number, _: called.append(number), number)
    thread.join(60)
    assert sorted(called) == [*range(len(replies))]
