"""What functions of the user's may raise and call, and what becomes of the frames then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.envs import Counting
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer
from helpers.waiting import eventually
from tensordict import TensorDict

import distcollect as dc

T = 4


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

    class Ending(Counting):
        def step(self, action: Any) -> Any:
            if self.stepped == 5:
                raise StopIteration("no more steps")
            return super().step(action)

    with dc.SyncDataCollector(
        lambda: GymWrapper(Ending()), frames_per_batch=T, total_frames=4 * T
    ) as collector:
        assert len(list(collector)) == 4
        [fault, *_] = collector.stats().env_faults
    assert "raised StopIteration: no more steps" in fault.message


@pytest.mark.parametrize("length", [1, 3])
def test_after_lost_rollouts_only_what_began_in_them_is_a_rest(length: int) -> None:
    seen: set[int] = set()
    make_env = CountingMaker("plain", 1, lengths=(length,))
    with loopback_collector(make_env, num_workers=1, sync=False, frames_per_batch=T) as collector:
        for _ in range(20):
            collector.pre_collect_hook = int  # what was collected before is dropped
            batch = collector.next(timeout_s=60)
            ids = batch["collector", "traj_ids"].flatten().tolist()
            steps = batch["observation"][..., 2].flatten().tolist()
            begun = dict(zip(reversed(ids), reversed(steps), strict=True))  # at the first frame
            rests = {traj_id for traj_id, step in begun.items() if traj_id not in seen and step}
            assert collector.rests.difference(seen) == rests
            seen.update(ids)
        assert any(collector.ledger.total.lost.values())


def test_after_lost_rollouts_whole_trajectories_are_not_abandoned() -> None:
    make_env = CountingMaker("plain", 1, lengths=(1,))
    with loopback_collector(
        make_env, num_workers=1, sync=False, frames_per_batch=T, trajs_per_batch=2 * T
    ) as collector:
        for _ in range(5):
            collector.pre_collect_hook = int
            collector.next(timeout_s=60)
            assert not collector.abandoned_frames


@pytest.mark.parametrize("kind", ["in process", "with a worker"])
@pytest.mark.parametrize(
    "error", [ValueError("full"), KeyboardInterrupt(), dc.WorkerLost("of another run")]
)
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
def test_a_batch_that_the_buffer_refused_is_none_of_a_resumed_run(kind: str) -> None:
    with make(kind) as earlier:
        earlier.next()
        state = earlier.state_dict()
    buffer = Buffer(ValueError("full"))
    with make(kind, replay_buffer=buffer) as collector:
        with pytest.raises(ValueError, match="full"):
            collector.next()
        collector.load_state_dict(state)
        collector.next()
    assert (buffer.added[0]["collector", "traj_ids"] >= state["next_traj_id"]).all()


@pytest.mark.parametrize("kind", ["in process", "with a worker"])
def test_a_batch_that_the_buffer_never_takes_is_lost(kind: str) -> None:
    collector = make(kind, replay_buffer=Buffer(ValueError("full")))
    with pytest.raises(ValueError, match="full"):
        collector.next()
    collector.shutdown()
    assert collector.stats().lost == {"shut_down": T}


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


def test_a_hook_gets_each_rollout_where_batches_are_of_trajectories() -> None:
    shapes: list[Any] = []

    def hook(rollout: TensorDict) -> None:
        shapes.append(rollout.shape)
        if len(shapes) == 3:
            raise ValueError("of the hook")

    settings = {"trajs_per_batch": 2 * T, "post_collect_hook": hook}
    with make("in process", **settings) as collector:
        with pytest.raises(ValueError, match="of the hook"):
            collector.next()
        assert shapes == [(T,)] * 3
        assert collector.stats().lost == {"given_up": T}
        collector.next()
    assert len(shapes) == collector.frames // T + 1


@pytest.mark.parametrize("name", ["postproc", "pre_collect_hook", "post_collect_hook", "buffer"])
def test_a_batch_within_a_batch_is_refused(name: str) -> None:
    """Taking one within a hook counted frames as lost that were delivered."""
    refused = []

    def function(*batch: TensorDict) -> Any:
        with pytest.raises(dc.CollectorStateError, match="is making a batch already") as error:
            collector.next()
        refused.append(error)
        return batch[0] if batch else None

    buffer = {"replay_buffer": SimpleNamespace(extend=function)}
    with make("in process", **(buffer if name == "buffer" else {name: function})) as collector:
        for _ in range(3):
            collector.next()
    assert len(refused) == 3
    assert (collector.stats().delivered, collector.stats().lost) == (3 * T, {})


def test_a_batch_that_the_buffer_refused_is_lost_when_the_background_begins() -> None:
    buffer = Buffer(ValueError("full"))
    with make("in process", total_frames=4 * T, replay_buffer=buffer) as collector:
        with pytest.raises(ValueError, match="full"):
            collector.next()
        collector.start()
        eventually(lambda: not collector.is_running)
        stats = collector.stats()
    assert (stats.delivered, stats.lost) == (4 * T, {"given_up": T})
