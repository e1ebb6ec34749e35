"""TorchRL envs in processes of their own and in workers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from helpers.torchrl_checks import check_the_same_frames_as_from_torchrls_collector, zoo

import distcollect as dc

__all__ = ["zoo"]


def test_the_same_frames_as_from_torchrls_collector(zoo: Any) -> None:
    check_the_same_frames_as_from_torchrls_collector(zoo, "parallel")


@pytest.mark.parametrize("cat_results", [-1, "stack"])
def test_entries_whose_shape_changes_at_each_step(zoo: Any, cat_results: Any) -> None:
    settings = {"frames_per_batch": 16, "cat_results": cat_results}
    with dc.MultiSyncDataCollector([zoo.Growing] * 2, **settings) as collector:
        batch = collector.next()
    assert batch.shape == ((2, 8) if cat_results == "stack" else (16,))
    sizes = [len(frame["observation"]) for frame in batch.reshape(-1)]
    assert sizes == 2 * [1, 2, 3, 1, 2, 3, 1, 2]
    assert (batch["collector", "worker_id"].flatten() == torch.arange(16) // 8).all()


@pytest.mark.parametrize("kind", ["MultiSyncDataCollector", "MultiaSyncDataCollector"])
def test_an_error_that_every_replacement_has_ends_the_run(
    zoo: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"frames_per_batch": 12, "num_workers": 2}
    with (
        getattr(dc, kind)(zoo.secret, **settings) as collector,
        pytest.raises(dc.WorkerError, match="is not to travel") as caught,
    ):
        collector.next()
    assert type(caught.value) is dc.WorkerError
    lost = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert sum("the run ends" in message for message in lost) == 1
    assert len(lost) <= 8  # two workers fail three times each, one of them once more


def test_env_creator_and_lists(zoo: Any) -> None:
    from torchrl.envs import EnvCreator  # noqa: PLC0415

    creator = EnvCreator(zoo.Counter)
    with dc.SyncDataCollector(creator, frames_per_batch=12, envs_per_worker=3) as collector:
        assert collector.next().shape == (3, 4)
    with dc.SyncDataCollector([zoo.Counter(), zoo.Counter], frames_per_batch=12) as collector:
        assert collector.next().shape == (2, 6)
    makers = [zoo.Counter, creator]
    with dc.RPCDataCollector(makers, frames_per_batch=12, num_workers=2, sync=True) as collector:
        assert collector.next().shape == (2, 6)


def test_a_parallel_env_that_raises_is_made_anew(zoo: Any) -> None:
    faults = dc.Faults(max_env_faults=1)
    with dc.SyncDataCollector(zoo.mended(), frames_per_batch=10, faults=faults) as collector:
        batch = collector.next()
    # It raises in its second step, which makes no frame.
    begins = torch.tensor([0, 0, 1, 2, 0])
    assert (batch["observation"][..., 0] == begins).all()
    assert (batch["next", "observation"][..., 0] == begins + 1).all()
    assert (batch["collector", "faulted"] == (torch.arange(5) == 0)).all()
    assert batch["next", "truncated"][:, 0].all()
    assert batch["next", "done"][:, 0].all()


def test_the_processes_of_a_parallel_env_are_let_run(zoo: Any) -> None:
    """Without its own way to wait; the end of one of its processes is noticed."""
    from distcollect.integrations.torchrl.envs import TorchRLEnvs  # noqa: PLC0415

    rows = [partial(zoo.Counter, first_row=row) for row in range(2)]
    env = zoo.ParallelEnv(2, rows)
    envs = TorchRLEnvs([zoo.TransformedEnv(env, zoo.StepCounter())], [None])
    assert type(env).__module__ == "distcollect.integrations.torchrl.parallel"
    td = envs.reset()
    try:
        frame, td = envs.step(envs.choose_randomly(td))
        assert (frame["next", "step_count"] == 1).all()
        env._workers[0].kill()
        env._workers[0].join()
        with pytest.raises(dc.EnvError, match=r"ParallelEnv\): step\(\) raised"):
            envs.step(envs.choose_randomly(td))
    finally:
        for process in env._workers:
            with contextlib.suppress(ValueError):  # the env has closed it already
                process.kill()


def test_what_cannot_be(zoo: Any) -> None:
    with pytest.raises(dc.ArgumentError, match="resets rows one step late"):
        dc.SyncDataCollector(zoo.GymEnv("CartPole-v1", num_envs=2), frames_per_batch=20)


def test_torchrl_is_imported_only_by_its_user() -> None:
    code = "import sys, distcollect as dc\n"
    code += "with dc.SyncDataCollector('CartPole-v1', frames_per_batch=4) as c: c.next()\n"
    code += "sys.exit('torchrl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
