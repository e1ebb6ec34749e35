"""What functions of the user's may raise and call, and what becomes of the frames then."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc

T = 4


class Counting(gym.Env[np.ndarray, Any]):
    """Observes how often it was stepped; raises what it is told to."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, raises_at: int | None = None) -> None:
        self.stepped = 0
        self.raises_at = raises_at

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.array([float(self.stepped)]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.stepped += 1
        if self.stepped == self.raises_at:
            raise StopIteration("no more steps")
        return np.array([float(self.stepped)]), 1.0, False, False, {}


class Buffer(KeepingBuffer):
    """Raises ``error`` once if it has one."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def extend(self, data: TensorDict) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        super().extend(data)


def make(kind: str, **kwargs: Any) -> Any:
    if kind == "in process":
        return dc.SyncDataCollector(Counting, frames_per_batch=T, **kwargs)
    return loopback_collector(Counting, num_workers=1, sync=True, frames_per_batch=T, **kwargs)


def test_a_state_error_of_the_users_ends_the_background_by_name() -> None:
    """It was taken for the collector's own, that it was shut down."""
    other = dc.SyncDataCollector(Counting, frames_per_batch=T)
    other.shutdown()
    collector = make(
        "in process", replay_buffer=Buffer(), post_collect_hook=lambda batch: other.next()
    )
    collector.start()
    eventually(lambda: not collector.is_running)
    with pytest.raises(dc.CollectorStateError, match="was shut down"):
        collector.async_shutdown(timeout=60)


def test_a_torchrl_env_that_raises_stop_iteration_is_replaced() -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from torchrl.envs import GymWrapper  # noqa: PLC0415

    with dc.SyncDataCollector(
        lambda: GymWrapper(Counting(raises_at=6)), frames_per_batch=T, total_frames=4 * T
    ) as collector:
        assert len(list(collector)) == 4
        [fault, *_] = collector.stats().env_faults
    assert "raised StopIteration: no more steps" in fault.message


@pytest.mark.parametrize("kind", ["in process", "with a worker"])
@pytest.mark.parametrize("error", [ValueError("full"), KeyboardInterrupt()])
def test_a_batch_that_the_buffer_refuses_is_added_by_the_next_call(
    kind: str, error: BaseException
) -> None:
    buffer = Buffer()
    with make(kind, replay_buffer=buffer) as collector:
        collector.next()
        buffer.error = error
        with pytest.raises(type(error)):
            collector.next()
        assert len(buffer.added) == 1
        if kind != "in process":
            assert collector.ledger.total.delivered == T
        for _ in range(2):
            collector.next()
    steps = torch.cat([data["next", "observation"] for data in buffer.added]).flatten().tolist()
    assert steps == [*range(1, 3 * T + 1)]


@pytest.mark.parametrize("kind", ["in process", "with a worker"])
def test_a_batch_that_the_buffer_never_takes_is_lost(kind: str) -> None:
    collector = make(kind, replay_buffer=Buffer(ValueError("full")))
    with pytest.raises(ValueError, match="full"):
        collector.next()
    collector.shutdown()
    assert collector.stats().lost == {"shut_down": T}


@pytest.mark.parametrize("name", ["postproc", "pre_collect_hook", "post_collect_hook"])
def test_a_batch_within_a_batch_is_refused(name: str) -> None:
    """Taking one within a hook counted frames as lost that were delivered."""
    refused = []

    def function(*batch: TensorDict) -> Any:
        with pytest.raises(dc.CollectorStateError, match="is making a batch already") as error:
            collector.next()
        refused.append(error)
        return batch[0] if batch else None

    with make("in process", **{name: function}) as collector:
        for _ in range(3):
            assert collector.next().shape == (T,)
    assert len(refused) == 3
    assert collector.stats().lost == {}


def test_a_buffer_takes_no_batch_while_it_is_given_one() -> None:
    class Greedy(Buffer):
        def extend(self, data: TensorDict) -> None:
            super().extend(data)
            with pytest.raises(dc.CollectorStateError, match="is making a batch already"):
                collector.next()

    buffer = Greedy()
    with make("in process", replay_buffer=buffer) as collector:
        collector.next()
    assert len(buffer.added) == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [(KeyError, "policy_failed"), (ValueError, "policy_failed"), (SystemExit, "interrupted")],
)
def test_frames_name_what_ended_their_rollout(error: type[BaseException], cause: str) -> None:
    calls = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        calls.append(observation)
        if len(calls) == T:
            raise error("in the policy")
        return torch.zeros(len(observation), dtype=torch.int64)

    collector = dc.SyncDataCollector(Counting, policy, frames_per_batch=100)
    with pytest.raises((dc.PolicyError, SystemExit), match="in the policy"):
        collector.next()
    collector.shutdown()
    [(found, num_frames)] = collector.stats().lost.items()
    assert found == cause
    assert 0 < num_frames < T


def test_a_batch_that_the_buffer_refused_is_lost_when_the_background_begins() -> None:
    class Refusing:
        num_calls = 0

        def extend(self, data: TensorDict) -> None:
            self.num_calls += 1
            if self.num_calls == 2:
                raise ValueError("full")

    with dc.SyncDataCollector(
        "CartPole-v1", frames_per_batch=8, total_frames=32, replay_buffer=Refusing()
    ) as collector:
        collector.next()
        with pytest.raises(ValueError, match="full"):
            collector.next()
        collector.start()
        eventually(lambda: not collector.is_running)
        stats = collector.stats()
    assert stats.delivered == 32
    assert stats.lost == {"given_up": 8}
