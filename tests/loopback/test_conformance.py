"""The data contract, kept with all spaces and info entries, in one process.

The judges compare the frames of every kind of env, and of every collector, with the truth.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.batch_contract import (
    DELIVERIES,
    LIGHT,
    SPACES,
    N,
    Oracle,
    T,
    check_a_maker_for_each_worker,
    check_contract,
    check_info_keys,
    run,
)
from helpers.counting_envs import (
    IN_PROCESS_KINDS,
    CountingEnv,
    CountingMaker,
)
from torch import nn

import distcollect as dc


@pytest.mark.parametrize("kind", ["plain", "sync-same", "native-next", "native-disabled"])
@pytest.mark.parametrize("spaces", SPACES, ids="-".join)
@pytest.mark.parametrize("delivery", LIGHT)
def test_every_space(delivery: str, kind: str, spaces: tuple[str, str]) -> None:
    check_contract(delivery, kind, spaces)


@pytest.mark.parametrize("option", [{"max_frames_per_traj": 3}, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("delivery", LIGHT)
def test_envs_that_cannot_be_cut_are_refused(delivery: str, option: dict[str, Any]) -> None:
    message = f"{next(iter(option))} does not work with this native vector env"
    with pytest.raises((dc.ArgumentError, dc.WorkerError), match=message):
        DELIVERIES[delivery].start(CountingMaker("native-next", N), **option)


@pytest.mark.parametrize("kind", IN_PROCESS_KINDS)
def test_info_keys(kind: str) -> None:
    check_info_keys("in-process", kind)


@pytest.mark.parametrize("delivery", LIGHT[1:])
def test_info_keys_in_workers(delivery: str) -> None:
    check_info_keys(delivery, "native-next")


@pytest.mark.parametrize("delivery", LIGHT[1:])
def test_a_maker_for_each_worker(delivery: str) -> None:
    check_a_maker_for_each_worker(delivery)


@pytest.mark.parametrize("instances", [False, True])
def test_a_maker_for_each_env_in_this_process(instances: bool) -> None:
    given = [CountingEnv(i) if instances else partial(CountingEnv, i) for i in range(N)]
    way = DELIVERIES["in-process"]
    started = replace(way, collector=lambda _, *args, **kw: way.collector(given, *args, **kw))
    run(started, CountingMaker("plain", N), envs=1, frames_per_batch=N * T)


class Beyond(nn.Module):
    """Actions outside the bounds of a Box, on both sides."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        up = observation.sum(-1, keepdim=True) % 5 - 2.5
        return torch.cat([up, -up / 4], -1)


@pytest.mark.parametrize("kind", ["plain", "sync-next", "native-next"])
@pytest.mark.parametrize("delivery", LIGHT)
def test_clip_actions(delivery: str, kind: str) -> None:
    """The env gets clipped actions (it checks them); the batch has the chosen ones."""
    maker = CountingMaker(kind, N, action="box")
    kwargs = {"clip_actions": True, "shown": lambda action: np.clip(action, -1, 1)}
    oracle = run(DELIVERIES[delivery], maker, Beyond(), **kwargs)
    for batch in oracle.clones:
        assert torch.equal(batch["action"], Beyond()(batch["observation"]))
        assert batch["action"].abs().max() > 1


def test_actions_are_passed_on_as_they_are() -> None:
    with pytest.raises(dc.EnvError, match="is not in Box"):
        DELIVERIES["in-process"].start(CountingMaker("plain", N, action="box"), Beyond()).next()


@pytest.mark.parametrize("delivery", LIGHT)
def test_total_frames(delivery: str) -> None:
    way = DELIVERIES[delivery]
    frames = int(np.prod(way.shape(way.num_workers, N, T)))
    with pytest.warns(UserWarning, match=f"{3 * frames} frames will be collected") as caught:
        collector = way.collector(
            CountingMaker("plain", N),
            frames_per_batch=frames,
            envs_per_worker=N,
            total_frames=2 * frames + 1,
        )
    assert way.collector is not dc.SyncDataCollector or caught[0].filename == __file__
    oracle = Oracle(way, CountingMaker("plain", N))
    with collector:
        assert collector.total_frames == 3 * frames
        for batch in collector:
            oracle.take(batch)
            assert collector.frames == len(oracle.clones) * frames
            break
        for batch in collector:  # goes on
            oracle.take(batch)
        assert len(oracle.clones) == 3
        assert list(collector) == []
        with pytest.raises(StopIteration):
            collector.next()
    oracle.check()
