"""Which modules a callable holds, and what they are called."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import another_file
from helpers.another_file import told
from helpers.loopback_pool import loopback_collector
from helpers.replay_buffers import KeepingBuffer
from omegaconf import MISSING, OmegaConf
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import distcollect as dc
from distcollect.collectors.pickling import copied, pickled_plans
from distcollect.engine.pickled_plan import unpickled
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import ArgumentError
from distcollect.policy.weight_layout import module_of, named_tensors, published

net, other = nn.Linear(4, 2), nn.Linear(2, 1)
nothing = nn.Softmax(-1)


def by_name(observation: torch.Tensor) -> torch.Tensor:
    return nothing(net(observation))


def by_another(observation: torch.Tensor) -> torch.Tensor:
    return by_name(observation)


def in_a_comprehension(observation: torch.Tensor) -> list[torch.Tensor]:
    return [net(row) for row in observation]


class Agent:
    """Has modules in attributes."""

    def __init__(self, *nets: nn.Module) -> None:
        self.nets = list(nets)
        self.agent = self
        self.numbers = torch.ones(3)

    def act(self, observation: torch.Tensor) -> Any:
        return [part(observation) for part in self.nets]


class Calling:
    """Uses a global variable."""

    def __call__(self, observation: torch.Tensor) -> Any:
        return net(observation)


class Indirect:
    """Uses a global variable in another method than the one that is called."""

    def __call__(self, observation: torch.Tensor) -> Any:
        return self.act(observation)

    def act(self, observation: torch.Tensor) -> Any:
        return self.output(observation)

    def output(self, observation: torch.Tensor) -> Any:
        return net(observation)

    def unreached(self, observation: torch.Tensor) -> Any:
        return other(observation)


class Inherits(Indirect):
    def output(self, observation: torch.Tensor) -> Any:
        return super().output(observation)


class Space:
    """Has modules in a list of the class."""

    nets = (net,)
    critic = other

    @classmethod
    def act(cls, observation: torch.Tensor) -> Any:
        return cls.first(observation)

    @staticmethod
    def first(observation: torch.Tensor) -> Any:
        return Space.nets[0](observation)


def of_a_class(observation: torch.Tensor) -> Any:
    return Space.nets[0](observation)


class Headless(nn.Module):
    """A module that uses another one that is none of its parts."""

    def forward(self, observation: torch.Tensor) -> Any:
        return net(observation)


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = [net]
        self.targets = [other]

    def forward(self, observation: torch.Tensor) -> Any:
        return self.nets[0](observation)

    def loss(self, observation: torch.Tensor) -> Any:
        return self.targets[0](observation)


def by_another_file(observation: torch.Tensor) -> Any:
    return another_file.told(observation)


def by_a_class_of_another_file(observation: torch.Tensor) -> Any:
    return another_file.Shared.nets[0](observation)


def by_an_import(observation: torch.Tensor) -> Any:
    from helpers import another_file as file  # noqa: PLC0415

    return file.told(observation)


@torch.no_grad()
def without_gradients(observation: torch.Tensor) -> Any:
    return told(observation)


class Shared:
    """Has modules in attributes of the class, of which each object replaces one."""

    actor = net
    critic: nn.Module = nn.Linear(1, 1)

    def __init__(self) -> None:
        self.critic = nothing

    def __call__(self, observation: torch.Tensor) -> Any:
        return self.critic(self.actor(observation))


class Private:
    """Has a module in a slot whose name is private."""

    __slots__ = ("__net",)

    def __init__(self) -> None:
        self.__net = net

    def __call__(self, observation: torch.Tensor) -> Any:
        return self.__net(observation)


def late() -> Any:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        return after(observation)  # noqa: F821 - deleted

    after = net
    del after
    return policy


ONE = {
    "default": lambda x, net=net: net(x),
    "default of a name": lambda x, *, net=net: net(x),
    "global": by_name,
    "function of a function": by_another,
    "object that uses a global": Calling(),
    "class attribute": Shared(),
    "method of an object with a class attribute": Shared().__call__,
    "private slot": Private(),
    "comprehension": in_a_comprehension,
    "compiled": torch.compile(net.forward, backend="eager"),
    "part of another": Agent(nn.Sequential(net), net).act,
    "sequence": TensorDictSequential(
        TensorDictModule(by_name, in_keys=["a"], out_keys=["b"]),
        TensorDictModule(net.forward, in_keys=["b"], out_keys=["c"]),
    ),
}


@pytest.mark.parametrize("policy", ONE.values(), ids=ONE)
def test_the_only_module(policy: Any) -> None:
    found = named_tensors(policy)
    assert [value is net.weight for value in found.values()] == [True, False]
    assert {name.rpartition(".")[2] for name in found} == {"weight", "bias"}


OF_CODE = {
    "another method": Indirect(),
    "bound method that calls another": Indirect().act,
    "inherited method": Inherits(),
    "class method": Space.act,
    "function that reads an attribute of a class": of_a_class,
    "code of a module": Headless(),
    "list of a module": Listing(),
    "partial of a method": partial(Indirect().act),
}
OF_ANOTHER_FILE = {
    "function": told,
    "function of a file": by_another_file,
    "attribute of the file": lambda obs: another_file.net(obs) + 1,
    "class of the file": by_a_class_of_another_file,
    "file imported within": by_an_import,
    "function of a decorated one": without_gradients,
}


@pytest.mark.parametrize("policy", OF_CODE.values(), ids=OF_CODE)
def test_what_code_reads_of_objects_and_classes(policy: Any) -> None:
    assert [id(each) for each in named_tensors(policy).values()] == [id(net.weight), id(net.bias)]


@pytest.mark.parametrize("policy", OF_ANOTHER_FILE.values(), ids=OF_ANOTHER_FILE)
def test_what_code_reads_of_another_file(policy: Any) -> None:
    assert module_of(policy) is another_file.net


def test_several_are_named_by_where_they_are() -> None:
    assert list(named_tensors(Agent(net, other).act)) == [
        "nets_0.weight",
        "nets_0.bias",
        "nets_1.weight",
        "nets_1.bias",
    ]
    values, items = net, other  # names that a ModuleDict has for something else
    assert list(named_tensors(lambda obs: items(values(obs)))) == [
        "items_.weight",
        "items_.bias",
        "values_.weight",
        "values_.bias",
    ]


def with_default(body: nn.Module, observation: torch.Tensor, head: nn.Module = other) -> Any:
    return head(body(observation))


class Nested:
    def __init__(self) -> None:
        self.x = {"a.b": net}
        self.x_a = {"b": other}

    def act(self, observation: torch.Tensor) -> Any: ...


@pytest.mark.parametrize("policy", [partial(with_default, net), Nested().act])
def test_modules_that_would_have_the_same_name(policy: Any) -> None:
    found = module_of(policy)
    assert isinstance(found, nn.ModuleDict)
    assert {*found.values()} == {net, other}


@pytest.mark.parametrize("policy", [torch.relu, len, late(), Agent(nothing).act, partial(max)])
def test_none(policy: Any) -> None:
    assert module_of(policy) is None


def test_a_module_without_weights_is_the_policy_s() -> None:
    assert module_of(nothing) is nothing


class Scaled(nn.Linear):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("scale", torch.zeros(1), persistent=False)


scaled = Scaled()


def by_its_name(observation: torch.Tensor) -> torch.Tensor:
    return scaled(observation)


def test_a_function_that_travels_by_its_name_gets_the_mode_and_all_buffers() -> None:
    scaled.eval()
    scaled.scale.fill_(3.0)
    [payload] = pickled_plans([WorkerPlan("CartPole-v1", 1, policy=by_its_name)])
    scaled.train()
    scaled.scale.fill_(0.0)
    assert module_of(unpickled(payload).policy) is scaled  # as the worker's process has it
    assert not scaled.training
    assert scaled.scale == 3.0


def test_models_that_a_function_uses_by_its_name_are_one_with_those_of_its_file() -> None:
    encoder = another_file.encoder
    models = {"encoder": encoder}
    plan = WorkerPlan(lambda: encoder, 1, policy=another_file.encoded, models=models)
    [payload] = pickled_plans([plan])
    arrived = unpickled(payload)
    assert arrived.models["encoder"] is not encoder  # as the worker's process has both
    assert arrived.models["encoder"].weight is encoder.weight
    assert arrived.create_env_fn().weight is encoder.weight
    sent, received = (
        published(another_file.encoded, models),
        published(arrived.policy, arrived.models),
    )
    assert sent is not None
    assert received is not None
    assert [*received.state_dict()] == [*sent.state_dict()]


def test_models_count_as_models_only() -> None:
    found = published(by_name, {"model": nn.Sequential(net)})
    assert found is not None
    assert list(found.state_dict()) == ["model.0.weight", "model.0.bias"]


@dataclasses.dataclass
class _Unset:
    """A configuration with a value that the user has still to give."""

    folder: str = MISSING


def test_a_configuration_may_lack_values() -> None:
    config = OmegaConf.structured(_Unset)
    assert module_of(partial(by_another, config=config)) is net
    for kind in (UserDict, MappingProxyType):
        assert module_of(partial(by_another, net=kind({"net": other}))) is not net


class Absent:
    """Stands for something that is not there, as Werkzeug's and wrapt's proxies may."""

    __slots__ = ("absent",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class AbsentWithAll(Absent):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [Absent, AbsentWithAll])
def test_what_raises_when_it_is_looked_at_holds_nothing(kind: Any) -> None:
    policy = partial(by_another, absent=kind(), further=Agent(other))
    found = module_of(policy)
    assert found is not None
    assert list(found.children()) == [net, other]


def test_an_env_is_no_policy() -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv, ObservationNorm, TransformedEnv  # noqa: PLC0415

    norm = ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"])
    env = TransformedEnv(GymEnv("CartPole-v1"), norm)
    assert list(env.state_dict())

    def policy(td: TensorDictBase) -> Any:
        return env.rand_action(td)

    assert module_of(policy) is None
    env.close()


@pytest.mark.parametrize("by", ["a call", "each batch", "start"])
def test_it_is_said_once_that_no_weights_were_found(by: str) -> None:
    weights = torch.zeros(4, 2)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return (observation @ weights).argmax(-1)

    make: Any = dc.SyncDataCollector
    kwargs: dict[str, Any] = {"replay_buffer": KeepingBuffer()} if by == "start" else {}
    if by == "each batch":
        make = partial(loopback_collector, num_workers=1, update_at_each_batch=True)
    with (
        make("CartPole-v1", policy, frames_per_batch=4, **kwargs) as collector,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        if by == "start":
            collector.start()
        for _ in range(3):
            if by == "each batch":
                collector.next(timeout_s=60)
            else:
                collector.update_policy_weights_()
    said = [str(each.message) for each in warned if each.category is UserWarning]
    assert ["no weights were found in the policy <function" in each for each in said] == [True]


def test_what_another_method_uses_is_not_shared_with_the_background() -> None:
    with pytest.raises(ArgumentError, match="can't be copied for the background"):
        copied(Indirect(), {})


def test_a_policy_whose_class_has_its_module_is_left_as_it_is() -> None:
    shared = nn.Linear(1, 1)

    class Policy:
        net = shared

        def __call__(self, observation: torch.Tensor) -> Any:
            return self.net(observation)

    with pytest.raises(ArgumentError, match="class"):
        copied(Policy(), {})
    assert Policy.net is shared


def test_a_function_is_copied_with_its_module() -> None:
    class Net(nn.Linear):
        pass

    own = Net(1, 1)
    copy, _ = copied(lambda observation: own(observation)[0], {})
    assert isinstance(module_of(copy), Net)
    assert module_of(copy) is not own
