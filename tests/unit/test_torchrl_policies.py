"""With a TorchRL env, policies see and write what they see and write in TorchRL's collectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.torchrl_checks import zoo
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torch.distributions import LogNormal

import distcollect as dc
from distcollect.common import peer_ids
from distcollect.transport.failure import Failure

__all__ = ["zoo"]


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectory ids begin at 0, whichever states other tests have loaded."""
    monkeypatch.setattr(peer_ids, "_identity", peer_ids.Identity("run"))


class Recorder(TensorDictModuleBase):
    """A module without in_keys that remembers what it was called with."""

    def __init__(self, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.seen: list[TensorDictBase] = []
        self.shape = shape

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Write a constant action, and an entry that is not for delivery."""
        self.seen.append(td.copy())
        td["_memory"] = torch.zeros(td.batch_size)
        td["action"] = torch.zeros((*td.batch_size, *self.shape))
        return td


class Best(nn.Module):
    """Chooses the action with the highest value."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the action."""
        return value.argmax(-1)


def keys(td: TensorDictBase) -> set[Any]:
    """The keys of all entries."""
    return set(td.keys(include_nested=True, leaves_only=True))


@pytest.mark.parametrize("batch_size", [(), (5,), (2, 3)])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_it_sees(zoo: Any, batch_size: tuple[int, ...], device: str | None) -> None:
    env = zoo.Counter(batch_size=batch_size)
    ours, theirs = Recorder(), Recorder()
    sizes = {"frames_per_batch": 6 * env.batch_size.numel(), "device": device}
    reference = zoo.Collector(
        zoo.Counter(batch_size=batch_size),
        theirs,
        total_frames=sizes["frames_per_batch"],
        auto_register_policy_transforms=False,
        trust_policy=True,
        **sizes,
    )
    expected = next(iter(reference))
    reference.shutdown()
    with dc.SyncDataCollector(env, ours, **sizes) as collector:
        batch = collector.next()
    for mine, wanted in zip(ours.seen, theirs.seen, strict=True):
        assert keys(mine) == keys(wanted)
        assert mine.batch_size == wanted.batch_size
    assert ours.seen[-1].device == theirs.seen[-1].device
    assert torch.equal(
        ours.seen[-1]["collector", "traj_ids"], theirs.seen[-1]["collector", "traj_ids"]
    )
    assert batch.shape == expected.shape
    assert keys(batch.exclude("collector")) == keys(expected.exclude("collector"))
    assert torch.equal(batch["observation"], expected["observation"])


@pytest.mark.parametrize("has_spec", [True, False])
def test_random_policies(zoo: Any, has_spec: bool) -> None:
    from torchrl.modules import RandomPolicy  # noqa: PLC0415

    env = zoo.Counter()
    policy = RandomPolicy(env.full_action_spec) if has_spec else RandomPolicy()
    with dc.SyncDataCollector(env, policy, frames_per_batch=10) as collector:
        actions = collector.next()["action"]
    assert actions.shape == (10, 1)
    assert len(actions.unique()) == 10


def test_an_exploration_module(zoo: Any) -> None:
    from torchrl.modules import AdditiveGaussianModule  # noqa: PLC0415

    env = zoo.Counter()
    torch.manual_seed(0)
    noise = AdditiveGaussianModule(spec=None)
    policy = Seq(Mod(lambda obs: 0 * obs[..., :1], ["observation"], ["action"]), noise)
    with dc.SyncDataCollector(env, policy, frames_per_batch=10) as collector:
        assert len(collector.next()["action"].unique()) > 5


@pytest.mark.parametrize("has_primer", [True, False])
def test_a_recurrent_module(zoo: Any, has_primer: bool) -> None:
    from torchrl.envs import Compose, InitTracker, TransformedEnv  # noqa: PLC0415
    from torchrl.modules import LSTMModule  # noqa: PLC0415

    lstm = LSTMModule(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    policy = Seq(lstm, Mod(nn.Linear(4, 1), ["features"], ["action"]))

    def make() -> Any:
        env = zoo.Counter()
        if has_primer:
            primer = lstm.make_tensordict_primer()
            return TransformedEnv(env, Compose(InitTracker(), primer))
        return env

    with dc.SyncDataCollector(make, policy, frames_per_batch=10) as collector:
        batch = collector.next()
    begins = batch["is_init"][:, 0]
    assert begins.any()
    assert not begins.all()
    for name in ("recurrent_state_h", "recurrent_state_c"):
        before, after = batch[name], batch["next", name]
        assert (before[begins] == 0).all()
        assert torch.equal(before[1:][~begins[1:]], after[:-1][~begins[1:]])
        assert (after != 0).any()
    trained = policy(batch.exclude("action", "features"))
    assert trained["action"].shape == (10, 1)


def test_envs_stay_without_the_transforms_of_a_recurrent_policy(zoo: Any) -> None:
    from torchrl.modules import LSTMModule  # noqa: PLC0415

    lstm = LSTMModule(input_size=3, hidden_size=4, in_key="observation", out_key="features")
    policy = Seq(lstm, Mod(nn.Linear(4, 1), ["features"], ["action"]))
    sizes = {"frames_per_batch": 4, "auto_register_policy_transforms": False}
    with pytest.raises(KeyError, match=r"the policy raised KeyError.*is_init") as caught:
        dc.SyncDataCollector(zoo.Counter, policy, **sizes)
    assert isinstance(caught.value, dc.PolicyError)
    assert isinstance(Failure.of(caught.value, 3).error(), dc.PolicyKeyError)


def test_outputs_of_a_module(zoo: Any) -> None:
    class Two(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert observation.shape == (3,)
            return observation[:1] / 10, observation.sum()

    with dc.SyncDataCollector(zoo.Counter(), Two(), frames_per_batch=4) as collector:
        batch = collector.next()
    assert torch.equal(batch["action"], batch["observation"][:, :1] / 10)
    assert torch.equal(batch["output1"], batch["observation"].sum(-1))


def test_a_policy_that_returns_the_same_memory_each_time(zoo: Any) -> None:
    class Reusing(TensorDictModuleBase):
        memory: Any = None

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            if self.memory is None:
                self.memory = td.clone().set("action", torch.zeros(1))
            self.memory["observation"].copy_(td["observation"])  # but no other entry
            self.memory["action"].copy_(td["observation"][:1] / 8)
            return self.memory

    with dc.SyncDataCollector(zoo.Counter(), Reusing(), frames_per_batch=6) as collector:
        batch = collector.next()
    assert batch["observation"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(batch["action"], batch["observation"][:, :1] / 8)


def test_an_action_goes_to_the_env_as_it_is(zoo: Any) -> None:
    env = zoo.KINDS["discrete"]()
    with dc.SyncDataCollector(env, Recorder(()), frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["action"].dtype is torch.float32
    assert batch["action"].shape == (4,)


def test_step_count(zoo: Any) -> None:
    with dc.SyncDataCollector(
        zoo.Counter(), frames_per_batch=6, max_frames_per_traj=2
    ) as collector:
        batch = collector.next()
    assert batch["step_count"].flatten().tolist() == [0, 1, 0, 1, 0, 1]
    assert batch["next", "truncated"].flatten().tolist() == 3 * [False, True]
    env = zoo.KINDS["transformed"]
    with pytest.raises(dc.ArgumentError, match="the env has one"):
        dc.SyncDataCollector(env, frames_per_batch=6, max_frames_per_traj=2)


@pytest.mark.parametrize("compact", [False, True])
def test_entries_that_are_no_tensors(zoo: Any, compact: bool) -> None:
    with dc.SyncDataCollector(zoo.talking(), frames_per_batch=4, compact_obs=compact) as collector:
        batch = collector.next()
    assert batch.shape == (4,)
    assert batch.names == ["time"]
    assert [frame["text"] for frame in batch] == ["0", "1", "2", "0"]
    if compact:
        assert {*batch["next"].keys()} == {"reward", "done", "terminated", "truncated"}
    else:
        assert [frame["next", "text"] for frame in batch] == ["1", "2", "3", "1"]
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1]


def test_a_module_with_a_parameter_that_no_entry_is_for(zoo: Any) -> None:
    class Other(nn.Module):
        def forward(self, observation: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
            return observation + speed

    with pytest.raises(TypeError, match="are incompatible with entries in") as caught:
        dc.SyncDataCollector(zoo.Counter(), Other(), frames_per_batch=4)
    assert isinstance(caught.value, dc.PolicyError)
    # It is the same error if a worker raises it.
    assert isinstance(Failure.of(caught.value, 3).error(), dc.PolicySignatureError)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("mean", math.exp(0.5)), ("MODE", math.exp(-1.0)), ("median", 1.0), ("deterministic", None)],
)
def test_what_is_taken_of_a_distribution(zoo: Any, kind: str, expected: float | None) -> None:
    torchrl_utils = pytest.importorskip("torchrl.envs.utils")

    def policy(observation: torch.Tensor) -> LogNormal:
        return LogNormal(torch.zeros(1), torch.ones(1))

    exploration = torchrl_utils.ExplorationType[kind.upper()]
    with dc.SyncDataCollector(
        zoo.Counter(), policy, frames_per_batch=4, exploration_type=exploration
    ) as collector:
        actions = collector.next()["action"]
    wanted = math.exp(-1.0) if expected is None else expected
    assert torch.allclose(actions, torch.tensor(wanted))


def test_what_a_policy_of_torchrl_takes_of_its_distribution(zoo: Any) -> None:
    torchrl_utils = pytest.importorskip("torchrl.envs.utils")
    seen: list[Any] = []

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        seen.append(torchrl_utils.exploration_type())
        return tensordict.set("action", torch.zeros(1))

    for name in ("RANDOM", "DETERMINISTIC", "MODE", "MEAN", "MEDIAN"):
        wanted = torchrl_utils.ExplorationType[name]
        with dc.SyncDataCollector(
            zoo.Counter(), policy, frames_per_batch=2, exploration_type=wanted
        ) as collector:
            collector.next()
        assert set(seen) == {wanted}
        seen.clear()


@pytest.mark.parametrize("batch_size", [(), (3,)])
def test_a_fake_batch(zoo: Any, batch_size: tuple[int, ...]) -> None:
    settings: Any = {"frames_per_batch": 12, "track_policy_version": True, "set_truncated": True}
    with dc.SyncDataCollector(zoo.Counter(batch_size=batch_size), **settings) as collector:
        fake, batch = collector.fake_tensordict(), collector.next()
        assert fake.batch_size == batch.batch_size
        assert fake.names == batch.names
        for key, value in batch.items(include_nested=True, leaves_only=True):
            assert fake[key].dtype == value.dtype
            assert fake[key].shape == value.shape
            assert not fake[key].any()
        assert keys(fake) == keys(batch)
        assert collector.frames == 12
    for settings in ({"trajs_per_batch": 1}, {"split_trajs": True}):
        with (
            dc.SyncDataCollector(zoo.Counter(), frames_per_batch=4, **settings) as collector,
            pytest.raises(dc.CollectorStateError, match="no fixed shape"),
        ):
            collector.fake_tensordict()


def test_a_state_has_the_weights_of_the_policy(zoo: Any) -> None:
    first, second = (
        Mod(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"]) for _ in range(2)
    )
    with dc.SyncDataCollector(zoo.Counter(), first, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        state = collector.state_dict()
    with dc.SyncDataCollector(zoo.Counter(), second, frames_per_batch=4) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 1
        other = {**state, "policy_state_dict": nn.Linear(5, 5).state_dict()}
        with pytest.raises(dc.ArgumentError, match="the weights of another policy"):
            collector.load_state_dict(other)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


@pytest.mark.parametrize("kind", ["torchrl", "gymnasium"])
def test_lazy_modules_get_their_shapes_before_the_first_step(kind: str) -> None:
    net = Seq(Mod(nn.LazyLinear(2), ["observation"], ["value"]), Mod(Best(), ["value"], ["action"]))
    env: Any = "CartPole-v1"
    if kind == "torchrl":
        env = pytest.importorskip("torchrl.envs").GymEnv(
            "CartPole-v1", categorical_action_encoding=True
        )
    with dc.SyncDataCollector(env, net, frames_per_batch=8) as collector:
        before = {name: weight.clone() for name, weight in net.state_dict().items()}
        batch = collector.next()
        assert torch.equal(net(batch.clone())["action"], batch["action"])
        for name, weight in net.state_dict().items():
            assert torch.equal(weight, before[name])
        net(batch.clone())["value"].sum().backward()  # they are no inference tensors


def test_buffers_have_seen_nothing_but_the_frames(zoo: Any) -> None:
    norm = nn.BatchNorm1d(3)
    policy = Mod(nn.Sequential(norm, nn.Linear(3, 1)), ["observation"], ["action"])
    with dc.SyncDataCollector(zoo.Counter(batch_size=(2,)), policy, frames_per_batch=8) as found:
        assert norm.num_batches_tracked == 0
        found.next()
        assert norm.num_batches_tracked == 4
