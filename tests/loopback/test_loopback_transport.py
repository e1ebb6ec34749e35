"""The in-process transport keeps the contract of transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.transport_contract import (
    LARGE,
    SMALL,
    Loopback,
    check_a_declined_rollout_moves_no_bytes,
    check_a_method_that_is_not_there_is_an_error,
    check_a_rollout_is_offered_then_fetched,
    check_calls,
    check_closing_fails_answers_that_do_not_come,
    check_closing_waits_for_answers_owed_and_again_is_no_error,
    check_evicting_a_peer_fails_what_it_owes,
)


@pytest.fixture(params=[Loopback])
def world(request: pytest.FixtureRequest) -> Iterator[Loopback]:
    world = request.param()
    yield world
    world.close()


def test_calls(world: Loopback) -> None:
    check_calls(world)


def test_a_method_that_is_not_there_is_an_error(world: Loopback) -> None:
    check_a_method_that_is_not_there_is_an_error(world)


@pytest.mark.parametrize("num_steps", [0, SMALL, LARGE])
def test_a_rollout_is_offered_then_fetched(world: Loopback, num_steps: int) -> None:
    check_a_rollout_is_offered_then_fetched(world, num_steps)


@pytest.mark.parametrize("make", [Loopback])
def test_a_declined_rollout_moves_no_bytes(
    make: Callable[[], Loopback], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_declined_rollout_moves_no_bytes(make, monkeypatch)


def test_evicting_a_peer_fails_what_it_owes(world: Loopback) -> None:
    check_evicting_a_peer_fails_what_it_owes(world)


def test_closing_waits_for_answers_owed_and_again_is_no_error(world: Loopback) -> None:
    check_closing_waits_for_answers_owed_and_again_is_no_error(world)


def test_closing_fails_answers_that_do_not_come(world: Loopback) -> None:
    check_closing_fails_answers_that_do_not_come(world)
