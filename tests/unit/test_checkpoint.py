"""What a Checkpoint saves, and when."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import signal
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpointing import Constant, Echo, check_goes_on_where_it_was
from torch import nn

import distcollect as dc
from distcollect.common import signals
from distcollect.common.peer_ids import Identity
from distcollect.launch.run_folder import ENDED, LISTENING, RUN_VARIABLE, RunFolder, RunOver


def files(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir() if file.suffix != ".lock"]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    yield
    signals.stop_watching()


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    check_goes_on_where_it_was(tmp_path, dc.SyncDataCollector)


def test_saves_when_it_is_time(tmp_path: Path) -> None:
    part = nn.Linear(1, 1)
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", every_s=1e-9, part=part)
    assert checkpoint.step()
    with torch.no_grad():
        part.weight.fill_(7.0)
    assert checkpoint.step()
    with torch.no_grad():
        part.weight.fill_(8.0)
    assert checkpoint.load()
    assert part.weight.item() == 7.0


def test_the_step_after_the_last_batch_saves_once(tmp_path: Path) -> None:
    collector = dc.SyncDataCollector("CartPole-v1", None, frames_per_batch=4, total_frames=12)
    with collector:
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", every_s=1e6, collector=collector)
        assert [checkpoint.step() for _ in collector] == [False, False, True]
        assert not checkpoint.step()


class Counter:
    """A part whose state is what it is told to be."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["state"]


def test_every_file_can_be_loaded_again(tmp_path: Path) -> None:
    """Also one that was to be replaced by a file that could not."""
    path = tmp_path / "c.pt"
    dc.Checkpoint(path, counter=Counter(1), policy=nn.Linear(1, 1)).save()
    counter, policy = Counter(0), nn.Linear(1, 1)
    checkpoint = dc.Checkpoint(path, counter=counter, policy=policy)
    assert checkpoint.load()
    counter.state = Path("a")
    with pytest.raises(dc.ArgumentTypeError, match="the state of counter could not be loaded"):
        checkpoint.save()
    assert files(tmp_path) == ["c.pt"]
    assert dc.Checkpoint(path, counter=counter, policy=policy).load()
    assert counter.state == 1


@pytest.mark.parametrize("state", [lambda: None, threading.Lock(), [np.float32(1)]])
def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path, state: Any) -> None:
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", policy=nn.Linear(1, 1), counter=Counter(state))
    with pytest.raises(dc.ArgumentTypeError, match="the state of counter could not") as caught:
        checkpoint.save()
    assert len(str(caught.value)) < 250
    assert not files(tmp_path)


def test_numbers_of_numpy_in_a_dict_are_saved_as_those_of_python(tmp_path: Path) -> None:
    progress: dict[str, Any] = {"best": np.float32(0.5), "of": {"updates": np.int64(3)}}
    dc.Checkpoint(tmp_path / "c.pt", progress=progress).save()
    progress.clear()
    dc.Checkpoint(tmp_path / "c.pt", progress=progress).load()
    assert progress == {"best": 0.5, "of": {"updates": 3}}
    assert type(progress["best"]) is float


@pytest.mark.parametrize("value", [np.zeros(3), Path("a"), Namespace(), lambda: None])
def test_a_dict_is_checked_before_a_save_depends_on_it(tmp_path: Path, value: Any) -> None:
    wrong = {"deep": {"value": value}}
    kind = type(value).__name__
    with pytest.raises(dc.ArgumentTypeError, match=rf"\['deep'\]\['value'\] is a {kind}"):
        dc.Checkpoint(tmp_path / "c.pt", progress=wrong)
    progress: dict[str, Any] = {}
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", progress=progress)
    checkpoint.step()
    progress["value"] = value
    with pytest.raises(dc.ArgumentTypeError, match=rf"progress\['value'\] is a {kind}"):
        checkpoint.step()


def test_tensors_in_a_dict_are_loaded_in_place(tmp_path: Path) -> None:
    """An optimizer may have them; those that have another shape or dtype are replaced."""
    saved = {"alpha": nn.Parameter(torch.ones(1)), "mean": torch.ones(3), "new": torch.ones(1)}
    dc.Checkpoint(tmp_path / "c.pt", part=saved).save()
    alpha, mean = nn.Parameter(torch.zeros(1)), torch.zeros(2)
    part = {"mean": mean, "alpha": alpha, "gone": 1}
    assert dc.Checkpoint(tmp_path / "c.pt", part=part).load()
    assert part["alpha"] is alpha
    assert (alpha.item(), mean.tolist()) == (1.0, [0.0, 0.0])
    assert alpha.requires_grad
    assert list(part) == ["alpha", "mean", "new"]
    assert torch.equal(part["mean"], torch.ones(3))


def test_the_last_files_and_the_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations count more than what training saw, and the best is known after a restart."""

    def train(collector: Any, values: tuple[float, ...]) -> list[bool]:
        saved = []
        for value in values:
            nn.init.constant_(policy.value, value)
            progress["value"] = value
            collector.evaluate(1)
            saved.append(checkpoint.step())
            if not saved[-1]:
                checkpoint.save()
        return saved

    policy, progress = Constant(), {"value": 0.0}
    kwargs: dict[str, Any] = {"every_s": 1e6, "keep_last": 3, "best": "return"}
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
        parts = {"policy": policy, "progress": progress, "collector": collector}
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", **kwargs, **parts)
        nn.init.constant_(policy.value, 9.0)
        collector.next()
        assert not checkpoint.step()
        checkpoint.save()
        assert checkpoint.best_path.exists()
        assert train(collector, (1, 5, 3, 2, 4)) == [True, True, False, False, False]
    found = {}
    for file in tmp_path.glob("c*"):
        with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
            parts["collector"] = collector
            assert dc.Checkpoint(tmp_path / "c.pt", **parts).load(file)
            assert policy.value.item() == progress["value"]
            found[file.name] = progress["value"]
    assert found == {"c-best.pt": 5, "c-4.pt": 3, "c-5.pt": 2, "c.pt": 4}
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
        parts["collector"] = collector
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", **kwargs, **parts)
        assert checkpoint.load()
        assert train(collector, (4.5, 6.0)) == [False, True]
        progress["unknown"] = Path("a")
        with pytest.raises(dc.ArgumentTypeError, match=r"progress\['unknown'\] is a PosixPath"):
            train(collector, (7.0,))
        del progress["unknown"]
        with monkeypatch.context() as patched:
            patched.setattr(os, "link", no_links)
            assert checkpoint.step(), "the best one was not saved"
    monitor = dc.Monitor(metrics={"reward": ("next", "reward")})
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4, monitor=monitor) as collector:
        parts["collector"] = collector
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", **{**kwargs, "best": "reward"}, **parts)
        assert checkpoint.load(checkpoint.best_path)
        assert policy.value.item() == 7.0
        assert train(collector, (2.0,)) == [True], "compared with the best return"


def test_the_best_begins_anew_where_its_file_is_missing(tmp_path: Path) -> None:
    """As after the newest file alone was copied: no later one might be as good."""
    policy = Constant()
    for value in (5.0, 1.0):
        with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
            checkpoint = dc.Checkpoint(
                tmp_path / "c.pt", best="return", policy=policy, collector=collector
            )
            checkpoint.load()
            nn.init.constant_(policy.value, value)
            collector.evaluate(1)
            assert checkpoint.step()
            assert checkpoint.load(checkpoint.best_path)
            checkpoint.best_path.unlink()


def test_one_episode_after_a_restart_is_not_better_than_a_hundred(tmp_path: Path) -> None:
    policy, found = Constant(), []
    for value, frames_per_batch in ((1.0, 100), (2.0, 50)):
        with dc.SyncDataCollector(Echo, policy, frames_per_batch=frames_per_batch) as collector:
            parts = {"policy": policy, "collector": collector}
            checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", **parts)
            checkpoint.load()
            nn.init.constant_(policy.value, value)
            for _ in range(100 // frames_per_batch):
                collector.next()
                checkpoint.save()
                saved = torch.load(checkpoint.best_path, weights_only=True)
                found.append(saved["parts"]["policy"]["value"].item())
    assert found == [1.0, 1.0, 2.0]


def test_the_best_has_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    """Not those of the step that saves it, before which the policy has learned."""
    policy = Constant()
    net, progress = nn.ModuleDict({"actor": policy, "critic": nn.Linear(1, 1)}), {"value": 0}
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
        parts = {"net": net, "progress": progress, "collector": collector}
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", **parts)
        for value in (1, 3, 2):
            nn.init.constant_(policy.value, value)
            progress["value"] = value
            checkpoint.step()
            collector.update_policy_weights_(policy)
            assert collector.evaluate(1).weights is None
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
        parts["collector"] = collector
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", **parts)
        assert checkpoint.load(checkpoint.best_path)
        assert (policy.value.item(), progress["value"]) == (3.0, 2)
    saved = torch.load(checkpoint.path, weights_only=True)["parts"]
    assert saved["net"]["actor.value"].item() == 2.0


@pytest.mark.parametrize("normalize", [None, dc.Normalize()])
@pytest.mark.parametrize("gives", ["module", "copies"])
def test_the_best_has_the_weights_of_a_learner_of_its_own(
    tmp_path: Path, gives: str, normalize: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the collector acts with a copy on another device."""
    learner, target = Constant(), Constant()
    net = nn.ModuleDict({"actor": learner, "critic": nn.Linear(1, 1)})
    with dc.SyncDataCollector(
        Echo, Constant(), frames_per_batch=4, normalize=normalize
    ) as collector:
        parts = {"target": target, "net": net, "collector": collector}
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", **parts)
        for value in (1.0, 3.0, 2.0):
            nn.init.constant_(learner.value, value)
            checkpoint.step()
            copies = {"value": learner.value.detach().clone()}
            collector.update_policy_weights_(learner if gives == "module" else copies)
            collector.evaluate(1)
    saved = torch.load(checkpoint.best_path, weights_only=True)["parts"]
    if gives == "module":
        assert (saved["net"]["actor.value"].item(), saved["target"]["value"].item()) == (3.0, 0.0)
    else:  # it could be the target's
        assert (saved["net"]["actor.value"].item(), saved["target"]["value"].item()) == (2.0, 0.0)
        assert "not those that were evaluated" in caplog.text


def test_the_best_has_the_weights_of_which_copies_were_given(tmp_path: Path) -> None:
    net = nn.ModuleDict({"actor": Constant(), "critic": nn.Linear(1, 1)})
    with dc.SyncDataCollector(Echo, Constant(), frames_per_batch=4) as collector:
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", net=net, collector=collector)
        for value in (1.0, 3.0, 2.0):
            nn.init.constant_(net["actor"].value, value)
            checkpoint.step()
            collector.update_policy_weights_({"value": torch.tensor([value])})
            collector.evaluate(1)
    saved = torch.load(checkpoint.best_path, weights_only=True)["parts"]
    assert saved["net"]["actor.value"].item() == 3.0


def test_an_evaluation_before_the_checkpoint_keeps_no_later_best_away(tmp_path: Path) -> None:
    """Its weights are not known."""
    policy = Constant()
    with dc.SyncDataCollector(Echo, policy, frames_per_batch=4) as collector:
        collector.evaluate(1)
        parts = {"policy": policy, "collector": collector}
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", **parts)
        collector.next()
        checkpoint.save()
    assert checkpoint.best_path.exists()


def test_files_that_another_one_wrote_stay(tmp_path: Path) -> None:
    """Their names are as those of the files that it keeps."""
    other = dc.Checkpoint(tmp_path / "run-1.pt", part={"of": "run-1"})
    other.save()
    part: dict[str, Any] = {}
    checkpoint = dc.Checkpoint(tmp_path / "run.pt", keep_last=2, part=part)
    for number in range(4):
        part["number"] = number
        checkpoint.save()
    (tmp_path / "run-7.pt").write_bytes(b"mine")
    checkpoint.save()
    checkpoint.save()
    assert sorted(files(tmp_path)) == ["run-1.pt", "run-7.pt", "run-9.pt", "run.pt"]
    found: dict[str, Any] = {}
    assert dc.Checkpoint(tmp_path / "run-1.pt", part=found).load()
    assert found == {"of": "run-1"}


@pytest.mark.parametrize("exists", [True, False])
def test_the_best_replaces_no_file_of_another(tmp_path: Path, exists: bool) -> None:
    other = dc.Checkpoint(tmp_path / "c-best.pt", part={"of": "other"})
    with dc.SyncDataCollector(Echo, Constant(), frames_per_batch=4) as collector:
        if exists:
            other.save()
            with pytest.raises(dc.ArgumentError, match=r"would replace .*c-best.pt"):
                dc.Checkpoint(tmp_path / "c.pt", best="return", collector=collector)
            return
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", best="return", collector=collector)
        other.save()
        collector.evaluate(1)
        with pytest.raises(dc.ArgumentError, match=r"would replace .*c-best.pt"):
            checkpoint.step()
    found: dict[str, Any] = {}
    assert dc.Checkpoint(tmp_path / "c-best.pt", part=found).load()
    assert found == {"of": "other"}


@pytest.mark.parametrize("width", [10, 1000])
def test_a_disk_without_room_is_named(tmp_path: Path, width: int) -> None:
    """Torch itself says nothing of it, and the file from before stays."""
    module = nn.Linear(1, width)
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", module=module)
    checkpoint.save()
    before = checkpoint.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match=r"c\.pt can't be written: "):
            checkpoint.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert checkpoint.path.read_bytes() == before
    assert files(tmp_path) == ["c.pt"]


class Unbounded(Echo):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, math.inf if reward > 10 else reward, *rest


def test_an_infinite_return_is_not_the_best_for_ever(tmp_path: Path) -> None:
    policy = Constant()
    with dc.SyncDataCollector(Unbounded, policy, frames_per_batch=4, check_nan=False) as collector:
        checkpoint = dc.Checkpoint(
            tmp_path / "c.pt", every_s=1e6, best="return", policy=policy, collector=collector
        )
        saved = []
        for value in (1.0, 11.0, 2.0):
            nn.init.constant_(policy.value, value)
            collector.evaluate(1)
            saved.append(checkpoint.step())
    assert saved == [True, False, True]


def test_other_trainers_do_not_say_that_they_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Identity("run", trainer=1, num_trainers=2)
    monkeypatch.setattr("distcollect.collectors.checkpoint.identity", lambda: other)
    checkpoint = dc.Checkpoint(tmp_path / "c.pt", every_s=1e-9, part=nn.Linear(1, 1))
    assert not checkpoint.step()
    assert not checkpoint.path.exists()


def no_links(*_: object) -> None:
    raise PermissionError("links are not permitted")


class Pressed(Counter):
    """Ctrl-C is pressed while this is saved."""

    def state_dict(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return super().state_dict()


def test_ctrl_c_pressed_again_saves_nothing(tmp_path: Path) -> None:
    with dc.SyncDataCollector(Echo, None, frames_per_batch=4) as collector:
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", save_on_ctrl_c=True, part=Pressed(1))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.step()
        collector.next()  # as in a notebook, where the user goes on
    assert not files(tmp_path)


def test_a_signal_saves_once(tmp_path: Path) -> None:
    """What closes the collectors afterwards waits as well."""
    with dc.SyncDataCollector(Echo, None, frames_per_batch=4) as collector:
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", progress={})
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(SystemExit, match="75"):
            checkpoint.step()
        checkpoint.path.unlink()
        collector.next()
    assert not checkpoint.path.exists()


def test_a_signal_saves_all_checkpoints(tmp_path: Path) -> None:
    """Also if one can't be saved; of two with one path, the newest."""
    made = [dc.Checkpoint(tmp_path / "a.pt", progress={"n": n}) for n in range(2)]
    made += [dc.Checkpoint(tmp_path / "b.pt", part=Counter(Path("a")))]
    made += [dc.Checkpoint(tmp_path / "c.pt", progress={"n": 2})]
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(dc.ArgumentTypeError, match="the state of part could not be loaded"):
        made[-1].step()
    assert sorted(files(tmp_path)) == ["a.pt", "c.pt"]
    progress = {"n": -1}
    assert dc.Checkpoint(tmp_path / "a.pt", progress=progress).load()
    assert progress == {"n": 1}


def test_without_locks_a_path_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", no_locks)
    dc.Checkpoint(tmp_path / "c.pt", progress={}).save()


def test_a_state_of_other_frames_is_refused(tmp_path: Path) -> None:
    with dc.SyncDataCollector("CartPole-v1", None, frames_per_batch=4) as collector:
        dc.Checkpoint(tmp_path / "c.pt", collector=collector).save()
    with dc.SyncDataCollector("Acrobot-v1", None, frames_per_batch=4) as collector:
        checkpoint = dc.Checkpoint(tmp_path / "c.pt", collector=collector)
        with pytest.raises(
            dc.ArgumentError,
            match=r"observation \[4\] float32, this collector's have observation \[6\] float32",
        ):
            checkpoint.load()


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), np.random.rand(), random.random(), random.gauss(0, 1)  # noqa: NPY002

    checkpoint = dc.Checkpoint(tmp_path / "c.pt", progress={})
    draw()
    checkpoint.save()
    drawn = draw()
    checkpoint.load()
    assert draw() == drawn


def start_of_job(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))


def test_a_trainer_that_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM starts it on another host, as it has lost the contact to the first, which goes on."""
    folder = RunFolder(tmp_path)
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    start_of_job(monkeypatch, "7", 0)
    folder.tell(LISTENING, host="first", port=1)
    module = nn.Linear(1, 1)
    first = dc.Checkpoint(module=module)
    first.save()
    assert folder.later_start() == ""

    start_of_job(monkeypatch, "7", 1)
    folder.tell(LISTENING, host="second", port=2)
    second = dc.Checkpoint(module=module)
    second.load()
    nn.init.constant_(module.weight, 2.0)
    second.save()

    start_of_job(monkeypatch, "7", 0)
    nn.init.constant_(module.weight, 1.0)
    with pytest.raises(dc.LaunchError, match=r"has started job 7 again on .*saves nothing more"):
        first.save()
    monkeypatch.setattr("distcollect.collectors.checkpoint._CHECK_START_S", 0.0)
    with pytest.raises(dc.LaunchError, match="has started job 7 again"):
        first.step()
    folder.tell(ENDED, why="it failed")
    assert folder.address() == ("second", 2)
    second.load()
    assert module.weight.item() == 2.0

    # Who cancels the run is in another job, or in none.
    start_of_job(monkeypatch, "8", 0)
    folder.tell(ENDED, why="it was cancelled")
    with pytest.raises(RunOver, match="it was cancelled"):
        folder.address()
