"""TorchRL's arguments for collectors with workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.counting_envs import CountingMaker
from helpers.envs import SamplingEnv
from helpers.loopback_pool import loopback_collector
from tensordict import TensorDict
from torch import nn

import distcollect as dc


class Policy(nn.Module):
    """Chooses action 0; the batch shows its weight."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, observation: torch.Tensor) -> Any:
        num_envs = len(observation)
        return torch.zeros(num_envs, dtype=torch.int64), {"weight": self.weight.expand(num_envs)}


# Workers unpickle functions by value: what these write to must be found by its module.
CALLS: list[Any] = []


def called(value: Any) -> None:
    from test_torchrl_arguments import CALLS  # noqa: PLC0415

    CALLS.append(value)


def before() -> None:
    called("before")


def started() -> None:
    called("started")


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def test_hooks_and_init_fn_are_called_in_the_workers() -> None:
    with loopback_collector(
        SamplingEnv,
        num_workers=1,
        sync=True,
        frames_per_batch=4,
        total_frames=8,
        init_fn=started,
        pre_collect_hook=before,
        post_collect_hook=called,
    ) as collector:
        batches = list(collector)
        with pytest.raises(dc.CollectorStateError, match="hooks run in the workers"):
            collector.post_collect_hook = called
        with pytest.raises(dc.CollectorStateError, match="set_seed"):
            collector.reset()
    assert [call for call in CALLS if isinstance(call, str)] == ["started", "before", "before"]
    seen = [call for call in CALLS if isinstance(call, TensorDict)]
    for rollout, batch in zip(seen, batches, strict=True):
        assert torch.equal(rollout["observation"], batch["observation"])


def fails(*_: Any) -> None:
    raise OSError("no paper")


@pytest.mark.parametrize("name", ["init_fn", "pre_collect_hook", "post_collect_hook"])
def test_an_error_in_a_hook_names_it(name: str) -> None:
    settings: dict[str, Any] = {name: fails}
    with (
        pytest.raises(dc.PolicyError, match=f"{name} raised OSError: no paper"),
        loopback_collector(SamplingEnv, num_workers=1, frames_per_batch=4, **settings) as collector,
    ):
        collector.next()


def test_workers_begin_with_the_weights_of_the_policy_beside_the_factory() -> None:
    policy = Policy(3.0)
    with loopback_collector(
        SamplingEnv, policy, policy_factory=Policy, num_workers=1, sync=True, frames_per_batch=4
    ) as collector:
        assert collector.policy is policy
        assert (collector.next()["weight"] == 3).all()
        policy.weight.data.fill_(5)
        collector.update_policy_weights_()
        assert (collector.next()["weight"] == 5).all()


def test_the_first_rollout_ends_the_others_with_a_threshold_of_zero() -> None:
    with loopback_collector(
        SamplingEnv, num_workers=2, sync=True, frames_per_batch=8, preemptive_threshold=0.0
    ) as collector:
        batch = collector.next()
    assert batch["collector", "mask"][:, 0].all()


def test_stats_count_the_workers() -> None:
    with loopback_collector(SamplingEnv, num_workers=2, sync=True, frames_per_batch=8) as collector:
        collector.next()
        stats = collector.stats(workers="both")
    assert (stats["workers"], stats["workers_alive"]) == (2, 2)
    assert (stats["worker_0/frames"], stats["worker_1/frames"]) == (4, 4)


class Buffer:
    """A replay buffer with a row for each env."""

    class storage:  # noqa: N801 - TorchRL's name for it
        ndim = 2

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def extend(self, data: TensorDict) -> None:
        self.shapes.append(tuple(data.shape))


@pytest.mark.parametrize("cat_results", [0, -1, "stack"])
@pytest.mark.parametrize(
    ("envs_per_worker", "expected"), [(2, [(2, 4), (2, 4)]), (1, None)], ids=["two", "one"]
)
def test_a_buffer_with_rows_gets_one_rollout_at_a_time(
    cat_results: Any, envs_per_worker: int, expected: Any
) -> None:
    buffer = Buffer()
    with loopback_collector(
        SamplingEnv,
        num_workers=2,
        envs_per_worker=envs_per_worker,
        sync=True,
        frames_per_batch=8 * envs_per_worker,
        cat_results=cat_results,
        replay_buffer=buffer,
    ) as collector:
        assert collector.next() is None
    # Rollouts of single envs stay together: each worker is a row.
    assert len(buffer.shapes) == (1 if expected is None else 2)
    assert expected in (None, buffer.shapes)


class FlatBuffer:
    """A replay buffer whose entries are along the first dimension."""

    def __init__(self) -> None:
        self.added: list[TensorDict] = []

    def extend(self, data: TensorDict) -> None:
        self.added.append(data)


@pytest.mark.parametrize("name", ["extend_buffer", "replay_buffer_chunk"])
@pytest.mark.parametrize("cat_results", [0, "stack"])
def test_a_buffer_gets_single_steps(name: str, cat_results: Any) -> None:
    added = {}
    for by_frame in (True, False):
        buffer = FlatBuffer()
        with loopback_collector(
            CountingMaker(),
            num_workers=2,
            envs_per_worker=3,
            sync=True,
            frames_per_batch=24,
            cat_results=cat_results,
            replay_buffer=buffer,
            **{name: by_frame},
        ) as collector:
            assert collector.next() is None
        added[by_frame] = buffer.added
    [frames] = added[True]
    assert frames.shape == (24,)
    assert [steps.shape for steps in added[False]] == [(4, 3), (4, 3)]
    rows = torch.cat([steps["observation"].transpose(0, 1).flatten(0, 1) for steps in added[False]])
    seen = slice(3)  # row, episode and step; the rest depends on the actions
    assert torch.equal(rows[:, seen], frames["observation"][:, seen])


def test_a_buffer_of_single_envs_gets_frames_either_way() -> None:
    buffer = FlatBuffer()
    with loopback_collector(
        SamplingEnv,
        num_workers=2,
        sync=True,
        frames_per_batch=8,
        replay_buffer=buffer,
        extend_buffer=False,
    ) as collector:
        collector.next()
    assert [frames.shape for frames in buffer.added] == [(8,)]


@pytest.mark.parametrize("what", [{"postproc": print}, {"split_trajs": True}])
def test_single_steps_and_what_needs_whole_batches(what: dict[str, Any]) -> None:
    [name] = what
    with pytest.raises(dc.ArgumentError, match=f"extend_buffer=False .* {name} needs whole"):
        dc.SyncDataCollector(
            SamplingEnv, frames_per_batch=8, replay_buffer=FlatBuffer(), extend_buffer=False, **what
        )


def test_frames_of_torchrls_envs_are_rounded_up() -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers.torchrl_envs import Counter  # noqa: PLC0415

    settings = {"num_workers": 2, "sync": True, "frames_per_batch": 9, "total_frames": 18}
    with pytest.warns(UserWarning, match=r"frames_per_batch=9 is no multiple of 2.*10 frames"):
        collector = loopback_collector(Counter, **settings)
    with collector:
        assert (collector.requested_frames_per_batch, collector.frames_per_batch) == (9, 10)
        assert [batch.numel() for batch in collector] == [10, 10]
        assert len(collector) == 2


def test_one_env_is_copied_to_all_workers() -> None:
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers.torchrl_envs import Counter  # noqa: PLC0415

    env = Counter()
    with loopback_collector([env] * 2, sync=True, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
