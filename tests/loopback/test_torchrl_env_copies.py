"""One TorchRL env, given as an object to several workers, which get copies of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.loopback_pool import loopback_collector
from helpers.torchrl_checks import zoo

import distcollect as dc

__all__ = ["zoo"]

# Workers unpickle the class by value: what it writes to must be found by its module.
FAULTS: list[str] = []


@pytest.mark.parametrize("is_listed", [False, True])
def test_copies_of_an_env_play_different_episodes(zoo: Any, is_listed: bool) -> None:
    env = zoo.pendulum()
    env.set_seed(3)
    env.reset()
    with loopback_collector(
        2 * [env] if is_listed else env,
        kind=dc.MultiSyncDataCollector,
        num_workers=2,
        envs_per_worker=2,
        frames_per_batch=40,
    ) as collector:
        starts = collector.next()["observation"].reshape(4, 10, 3)[:, 0]
    assert len(starts.unique(dim=0)) == 4
    # The first copy is in the state of the env, with its random generator.
    assert torch.equal(starts[0], env.reset()["observation"])


def test_a_copy_that_takes_the_place_of_another_plays_other_episodes(zoo: Any) -> None:
    class Pendulum(zoo.GymEnv):  # type: ignore[misc] - torchrl has no types
        def _step(self, tensordict: Any) -> Any:
            from test_torchrl_env_copies import FAULTS  # noqa: PLC0415

            if FAULTS:
                raise RuntimeError(FAULTS.pop())
            return super()._step(tensordict)

    env = Pendulum("Pendulum-v1")
    env.reset()
    FAULTS.append("worn out")
    faults = dc.Faults(max_env_faults=1)
    with loopback_collector(env, num_workers=1, frames_per_batch=10, faults=faults) as collector:
        start = collector.next()["observation"][0, 0]
    assert not FAULTS
    # A new env is tried out, so its first frame is not after its first reset.
    assert all(not torch.equal(start, env.reset()["observation"]) for _ in range(5))
