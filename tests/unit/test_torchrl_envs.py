"""TorchRL envs are stepped as its own collectors step them."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.torchrl_checks import (
    check_the_same_frames_as_from_torchrls_collector,
    entries,
    zoo,
)
from tensordict.nn import TensorDictModule as Mod

import distcollect as dc
from distcollect.collectors import with_workers

__all__ = ["zoo"]


def test_the_same_frames_as_from_torchrls_collector(zoo: Any) -> None:
    for kind in zoo.KINDS.keys() - {"parallel"}:
        check_the_same_frames_as_from_torchrls_collector(zoo, kind)


def test_the_same_frames_of_agents_that_die(zoo: Any) -> None:
    pytest.importorskip("pettingzoo", reason="the pettingzoo extra is not installed")
    from helpers.pettingzoo_env import Lives  # noqa: PLC0415
    from torchrl.envs import PettingZooWrapper  # noqa: PLC0415

    def make() -> Lives:
        return Lives(lives={"ant_0": 2, "ant_1": 4})

    def choose(observation: torch.Tensor) -> torch.Tensor:
        return (observation[..., :1] / 10).expand(*observation.shape[:-1], 3)

    policy = Mod(choose, in_keys=[("ant", "observation")], out_keys=[("ant", "action")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "tested with another version"
        env = PettingZooWrapper(make(), use_mask=True, done_on_any=False)
    sizes = {"frames_per_batch": 12, "total_frames": 12}
    reference = zoo.Collector(env, policy, auto_register_policy_transforms=False, **sizes)
    theirs = entries(next(iter(reference)).clone())
    reference.shutdown()
    with dc.SyncDataCollector(make(), policy, **sizes) as collector:
        ours = entries(collector.next())
    assert theirs.keys() == ours.keys() - {("next", "reward")}
    for key, value in theirs.items():
        # TorchRL marks absent agents both terminated and truncated, and an episode whose agents
        # ended in different ways neither.
        name = key if isinstance(key, str) else key[-1]
        if name not in ("terminated", "truncated"):
            assert ours[key].dtype == value.dtype, key
            torch.testing.assert_close(ours[key], value, rtol=0, atol=0, msg=str(key))


@pytest.mark.parametrize(
    ("kind", "num_envs"), [("one-hot", 1), ("one-hot", 2), ("agents", 2), ("serial", 1)]
)
def test_random_actions_are_the_specs(zoo: Any, kind: str, num_envs: int) -> None:
    env = zoo.KINDS[kind]()
    [(key, spec)] = env.full_action_spec_unbatched.items(include_nested=True, leaves_only=True)
    drawn_twice = []
    for _ in range(2):
        # They are drawn as TorchRL draws them: from torch's generator.
        torch.manual_seed(0)
        with dc.SyncDataCollector(
            zoo.KINDS[kind], envs_per_worker=num_envs, frames_per_batch=60
        ) as collector:
            drawn_twice.append(collector.next()[key])
    actions = drawn_twice[0]
    assert torch.equal(actions, drawn_twice[1])
    assert actions.dtype == spec.dtype
    drawn = actions.reshape(-1, *spec.shape)
    assert all(spec.is_in(action) for action in drawn)
    assert len(drawn.flatten(1).unique(dim=0)) > 1


def test_a_distribution_over_one_hot_actions(zoo: Any) -> None:
    def policy(observation: torch.Tensor) -> torch.distributions.Distribution:
        return torch.distributions.OneHotCategorical(logits=0 * observation)

    with dc.SyncDataCollector(zoo.KINDS["one-hot"], policy, frames_per_batch=10) as collector:
        batch = collector.next()
    assert batch["action"].shape == (10, 3)
    assert (batch["action"].sum(-1) == 1).all()


def test_a_policy_gets_entries_by_name(zoo: Any) -> None:
    def policy(observation: torch.Tensor, step_count: torch.Tensor) -> torch.Tensor:
        assert observation.shape == (5, 3)
        return step_count.float() / 10

    with dc.SyncDataCollector(
        zoo.KINDS["transformed batched"](), policy, frames_per_batch=40
    ) as collector:
        batch = collector.next()
    assert torch.equal(batch["action"], batch["step_count"].float() / 10)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_envs_of_gym(zoo: Any, mode: AutoresetMode) -> None:
    cut = 12 if mode is AutoresetMode.DISABLED else None
    with dc.SyncDataCollector(
        zoo.vector_env(mode), frames_per_batch=300, max_frames_per_traj=cut
    ) as collector:
        batch = collector.next()
    assert batch.shape == (3, 100)
    assert batch["action"].shape == (3, 100, 2)
    after, ended = batch["next", "observation"][:, :-1], batch["next", "done"][:, :-1, 0]
    assert ended.any(1).all()
    assert torch.equal(after[~ended], batch["observation"][:, 1:][~ended])
    # Poles at the start are upright, one that has fallen leans by 12 degrees.
    fallen = batch["next", "terminated"][:, :-1, 0][ended]
    assert fallen.any()
    assert (after[ended][fallen][:, 2].abs() > 0.2).all()
    assert (batch["observation"][:, 1:][ended].abs() < 0.051).all()


def test_an_env_that_raises_an_error_of_ours(zoo: Any) -> None:
    class Ours(zoo.Counter):
        def _step(self, tensordict: Any) -> Any:
            raise dc.EnvError("worn out")

    message = r"env 0 \(Ours\): step\(\) raised EnvError: worn out"
    with dc.SyncDataCollector(Ours(), frames_per_batch=4) as collector:
        with pytest.raises(dc.EnvError, match=message) as caught:
            collector.next()
        assert caught.value.__cause__ is not caught.value


def test_a_frame_before_a_reset_that_raises_is_counted(zoo: Any) -> None:
    breaks = iter([True])

    class Breaking(zoo.Counter):  # type: ignore[misc] - torchrl has no types
        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            if tensordict is not None and "_reset" in tensordict and next(breaks, False):
                raise RuntimeError("worn out")
            return super()._reset(tensordict, **kwargs)

    faults = dc.Faults(max_env_faults=1)
    with dc.SyncDataCollector(Breaking, frames_per_batch=10, faults=faults) as collector:
        batch = collector.next()
        stats = collector.stats()
    # Its episodes have three frames. The last one of the first episode is lost.
    assert batch["observation"][:5, 0].tolist() == [0, 1, 0, 1, 2]
    assert batch["collector", "faulted"][:3].tolist() == [False, True, False]
    assert (stats.delivered, stats.lost) == (10, {"env_failed": 1})
    [fault] = stats.env_faults
    assert "reset() raised RuntimeError: worn out" in fault.message


@pytest.mark.parametrize(
    ("given", "settings", "error", "message"),
    [
        (
            lambda zoo: [zoo.Counter, "CartPole-v1"],
            {},
            dc.ArgumentError,
            "can't mix TorchRL envs and others",
        ),
        (lambda zoo: zoo.Counter, {"info_keys": ["x"]}, dc.ArgumentError, "info_dict_reader"),
        (lambda zoo: zoo.Counter(batch_size=(5,)), {"envs_per_worker": 2}, dc.ArgumentError, "5"),
        (lambda zoo: 2 * [zoo.Counter()], {}, dc.ArgumentError, "same object"),
        (
            lambda zoo: [zoo.Counter, zoo.KINDS["one-hot"]],
            {},
            dc.SpaceError,
            r"env 1 \(Counter\) has other specs.*actions .*OneHot\[3\].* instead of .*Bounded",
        ),
        (lambda zoo: [zoo.Counter, zoo.Agents], {}, dc.SpaceError, "has other specs.*agents"),
        (
            lambda zoo: zoo.vector_env(AutoresetMode.SAME_STEP),
            {"max_frames_per_traj": 5},
            dc.ArgumentError,
            "does not work with this native vector env",
        ),
    ],
)
def test_what_cannot_be(
    zoo: Any, given: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dc.SyncDataCollector(given(zoo), frames_per_batch=20, **settings)


def test_an_env_that_cannot_be_pickled_is_refused_for_workers(zoo: Any) -> None:
    env = zoo.Counter()
    env.lock = threading.Lock()
    with pytest.raises(dc.ArgumentError, match=r"can't be sent to workers.*pass a callable"):
        dc.RPCDataCollector(env, frames_per_batch=20)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # VecNorm is deprecated
@pytest.mark.parametrize(
    ("form", "kind"),
    [("list", "VecNorm"), ("list", "VecNormV2"), ("env", "VecNormV2"), ("partial", "TrajCounter")],
)
def test_state_that_processes_share_is_refused_for_workers(
    zoo: Any, form: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(with_workers, "Workers", start)
    creator = zoo.sharing(kind)
    given: Any = partial(creator)
    if form != "partial":
        given = 2 * [creator] if form == "list" else zoo.ParallelEnv(2, creator)
    advice = r"can't be sent to .*: pass the function that makes the env instead of the EnvCreator"
    with pytest.raises(dc.ArgumentError, match=advice):
        dc.MultiSyncDataCollector(given, frames_per_batch=20, num_workers=2)
