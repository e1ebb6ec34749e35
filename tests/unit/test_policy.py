"""Policies of every kind, and what is said of those that don't fit."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import counting
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal

import distcollect as dc
from distcollect.policy.base import Exploration
from distcollect.policy.random import RandomPolicy
from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import Arrays, Key, flatten, leaves_of

N = 3


def observations(space: gym.Space[Any], n: int = N) -> Arrays:
    space.seed(7)
    rows = [list(flatten(space, space.sample())) for _ in range(n)]
    return {
        leaf.key: np.stack([np.asarray(row[index], leaf.numpy_dtype) for row in rows])
        for index, leaf in enumerate(leaves_of(space, "observation"))
    }


def bind(
    policy: Any, observation: str = "box32", action: str = "discrete", n: int = N, **kwargs: Any
) -> tuple[UserPolicy, Arrays]:
    space = counting.OBSERVATIONS[observation].space
    arrays = observations(space, n)
    return UserPolicy(policy, arrays, space, counting.ACTIONS[action], **kwargs), arrays


def call(policy: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Arrays]:
    """Actions, extras and the observations; of a second call, as the first one is special."""
    bound, arrays = bind(policy, *args, **kwargs)
    with bound.exploring():
        bound()
        chosen, written = bound()
    keys = [leaf.key for leaf in bound._leaves]
    for leaf, value in zip(bound.extras, written, strict=True):
        assert value.dtype == leaf.dtype
        assert value.shape[1:] == leaf.shape
    actions = dict(zip(keys, chosen, strict=True))
    extras = {leaf.key: value for leaf, value in zip(bound.extras, written, strict=True)}
    return actions, extras, arrays


def pick(observation: Any) -> torch.Tensor:
    return observation.sum(-1).abs().long() % 5


def noted(observation: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"note": observation * 2, "flag": observation[:, 0] > 0}


class Module(nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return pick(observation)


class ModuleWithExtras(nn.Module):
    def forward(self, observation: torch.Tensor) -> Any:
        return pick(observation), noted(observation)


class Callables:
    def __call__(self, whatever_name: torch.Tensor) -> torch.Tensor:
        return pick(whatever_name)

    def method(self, observation: torch.Tensor) -> Any:
        return pick(observation), noted(observation)

    def td_method(self, td: Any) -> None:
        td["action"] = pick(td["observation"])


class AnnotatedCall:
    def __call__(self, inputs: TensorDictBase) -> TensorDictBase:
        return inputs.set("action", pick(inputs["observation"]))


def by_name(td: Any) -> Any:
    td["action"] = pick(td["observation"])
    td.update(noted(td["observation"]))
    return td


def by_other_name(tensordict: Any) -> Any:
    return TensorDict({"action": pick(tensordict["observation"])}, [N])


def by_annotation(inputs: TensorDict) -> TensorDictBase:
    return by_name(inputs)


class TdModule(nn.Module):
    def forward(self, inputs: TensorDictBase) -> TensorDictBase:
        return by_name(inputs)


NOTED: set[Key] = {("note",), ("flag",)}
KINDS: dict[str, tuple[Any, set[Key]]] = {
    "module": (Module(), set()),
    "module with extras": (ModuleWithExtras(), NOTED),
    "sequential": (nn.Sequential(nn.Identity(), Module()), set()),
    "function": (pick, set()),
    "lambda": (lambda x: (pick(x), {"note": x, "flag": x}), NOTED),
    "partial": (partial(pick), set()),
    "callable": (Callables(), set()),
    "method": (Callables().method, NOTED),
    "td method": (Callables().td_method, set()),
    "td": (by_name, NOTED),
    "tensordict": (by_other_name, set()),
    "annotated": (by_annotation, NOTED),
    "annotated module": (TdModule(), NOTED),
    "annotated callable": (AnnotatedCall(), set()),
    "TensorDictModule": (
        TensorDictModule(Module(), in_keys=["observation"], out_keys=["action"]),
        set(),
    ),
    "with extra out_keys": (
        TensorDictSequential(
            TensorDictModule(lambda x: x * 2, in_keys=["observation"], out_keys=["note"]),
            TensorDictModule(lambda x: x[:, 0] > 0, in_keys=["observation"], out_keys=["flag"]),
            TensorDictModule(Module(), in_keys=["observation"], out_keys=["action"]),
        ),
        NOTED,
    ),
    "int32 action": (lambda x: pick(x).int(), set()),
    "numpy": (lambda x: pick(x).numpy(), set()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    policy, wanted = KINDS[kind]
    actions, extras, arrays = call(policy)
    observation = torch.from_numpy(arrays["observation",])
    assert set(actions) == {("action",)}
    assert torch.equal(actions["action",].long(), pick(observation))
    assert set(extras) == wanted
    if "lambda" not in kind and wanted:
        assert torch.equal(extras["note",], observation * 2)
        assert torch.equal(extras["flag",], observation[:, 0] > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_see_each_new_observation(kind: str) -> None:
    bound, arrays = bind(KINDS[kind][0])
    for value in range(3):
        arrays["observation",][:] = np.arange(N)[:, None] + value
        actions, _ = bound()
        assert actions[0].tolist() == [(row + value) * 4 % 5 for row in range(N)]


def test_the_module_of_a_policy_is_what_has_weights() -> None:
    module = Module()
    assert bind(module)[0].module is module
    assert bind(pick)[0].module is None


# Dict and Tuple observations.


def _place(place: torch.Tensor) -> Any:
    return place


def _two(image: torch.Tensor, place: torch.Tensor) -> Any:
    return image.sum((1, 2)) + place[:, 0]


def _nested(inner: Any) -> Any:
    return inner["echo"], inner["pair"]["0"], inner["pair"]["1"]


def _whole_then_named(observation: Any, place: Any) -> Any:
    assert observation["place"] is place
    return observation["inner"]["echo"]


def _default(place: Any, scale: float = 2.0) -> Any:
    return place * scale


def _all_named(**entries: Any) -> Any:
    assert list(entries) == ["image", "inner", "place"]
    return entries["place"]


def _keyword_only(*, place: Any) -> Any:
    return place


def _positional_only(place: Any, /) -> Any:
    return place


@pytest.mark.parametrize(
    "policy",
    [
        _place,
        _two,
        _nested,
        _whole_then_named,
        _default,
        _all_named,
        _keyword_only,
        _positional_only,
    ],
)
def test_dict_observations_by_parameter_names(policy: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def acting(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(policy(*args, **kwargs))
        return torch.zeros(N, dtype=torch.int64)

    acting.__wrapped__ = policy  # type: ignore[attr-defined]  # gives it the policy's signature
    _, _, arrays = call(acting, "dict")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    place, echo = tensors["place",], tensors["inner", "echo"]
    pair = tensors["inner", "pair", "0"], tensors["inner", "pair", "1"]
    expected: dict[Any, Any] = {
        _two: tensors["image",].sum((1, 2)) + place[:, 0],
        _nested: (echo, *pair),
        _whole_then_named: echo,
        _default: place * 2,
    }
    wanted = expected.get(policy, place)
    for one, other in zip(
        *([x] if torch.is_tensor(x) else x for x in (seen[-1], wanted)), strict=True
    ):
        assert torch.equal(one, other)


def test_a_dict_observation_as_a_whole_and_as_a_tensordict() -> None:
    def whole(observation: dict[str, Any]) -> torch.Tensor:
        assert set(observation) == {"image", "inner", "place"}
        assert set(observation["inner"]) == {"echo", "pair"}
        return observation["inner"]["echo"] % 5

    def as_td(td: TensorDictBase) -> TensorDictBase:
        assert td.shape == (N,)
        return td.set("action", td["inner", "echo"] % 5)

    for policy in (whole, as_td):
        actions, _, arrays = call(policy, "dict")
        assert actions["action",].tolist() == (arrays["inner", "echo"] % 5).tolist()


def test_a_parameter_that_is_no_entry() -> None:
    with pytest.raises(
        dc.PolicyError, match=r"'speed' is no entry .* its entries are: image, inner, place"
    ):
        bind(lambda place, speed: place, "dict")


def test_tuple_observations() -> None:
    def policy(observation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = observation
        assert first.shape == (N, 3)
        return second % 5

    actions, _, arrays = call(policy, "tuple")
    assert actions["action",].tolist() == (arrays["observation", "1"] % 5).tolist()


# Dict and Tuple actions.


def _dict_action(observation: Any) -> Any:
    return {"go": pick(observation) % 3, "how": (observation[:, :2], pick(observation) % 4)}


def _dict_action_td(td: TensorDictBase) -> TensorDictBase:
    go = pick(td["observation"])
    td["action", "go"] = go % 3
    td["action", "how", "0"] = td["observation"][:, :2]
    td["action", "how", "1"] = go % 4
    return td


def _tuple_action(observation: Any) -> Any:
    return pick(observation) % 3, (observation[:, :2] > 0).to(torch.int8)


def _tuple_with_extras(observation: Any) -> Any:
    return _tuple_action(observation), {"note": observation}


@pytest.mark.parametrize(
    ("policy", "action"),
    [
        (_dict_action, "dict"),
        (_dict_action_td, "dict"),
        (_tuple_action, "tuple"),
        (_tuple_with_extras, "tuple"),
    ],
)
def test_structured_actions(policy: Any, action: str) -> None:
    actions, extras, arrays = call(policy, "box32", action)
    chosen = pick(torch.from_numpy(arrays["observation",]))
    assert list(actions) == [leaf.key for leaf in leaves_of(counting.ACTIONS[action], "action")]
    assert torch.equal(next(iter(actions.values())), chosen % 3)
    assert set(extras) == ({("note",)} if policy is _tuple_with_extras else set())


def test_a_tuple_action_that_ends_with_a_dict_is_no_extras() -> None:
    space = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"force": spaces.Box(-1, 1, (2,))})))
    observation = counting.OBSERVATIONS["box32"].space
    arrays = observations(observation)

    def policy(x: torch.Tensor) -> Any:
        return pick(x) % 3, {"force": x[:, :2]}

    actions, extras = UserPolicy(policy, arrays, observation, space)()
    assert [tuple(action.shape) for action in actions] == [(N,), (N, 2)]
    assert not extras


@pytest.mark.parametrize("policy", [lambda x: {"go": pick(x)}, pick, lambda x: [x, x, x]])
def test_a_wrong_structure(policy: Any) -> None:
    with pytest.raises(dc.PolicyError, match="return a dict or tuple of that structure"):
        bind(policy, "box32", "dict")[0]()


# Dtypes of what goes in.


class Dtypes(nn.Module):
    def __init__(self, parameter: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = None if parameter is None else nn.Parameter(parameter)
        self.seen: torch.dtype | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.seen = observation.dtype
        return torch.zeros(len(observation), dtype=torch.int64)


@pytest.mark.parametrize(
    ("observation", "parameter", "expected"),
    [
        ("box64", torch.zeros(1), torch.float32),
        ("box32", torch.zeros(1, dtype=torch.float64), torch.float64),
        ("box64", None, torch.float64),
        ("image", torch.zeros(1), torch.uint8),
        ("discrete", torch.zeros(1), torch.int64),
        ("multibinary", torch.zeros(1), torch.int8),
    ],
)
def test_only_floats_are_cast(
    observation: str, parameter: torch.Tensor | None, expected: torch.dtype
) -> None:
    policy = Dtypes(parameter)
    bound, arrays = bind(policy, observation)
    before = arrays["observation",].copy()
    bound()
    assert policy.seen is expected
    assert (arrays["observation",] == before).all()


class Passing(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - named so by its base
        return torch.zeros(len(input), dtype=torch.int64), {"passed": input}


def test_what_is_cast_follows_the_observations() -> None:
    bound, arrays = bind(Passing(4, 4), "box64")
    for value in (0.1, 7.0):
        arrays["observation",][:] = value
        [passed] = bound()[1]
        assert passed.dtype == torch.float32
        assert (passed == torch.tensor(value)).all()


# Distributions.


def test_distributions_are_drawn_from() -> None:
    logits = torch.tensor([0.0, 0.5, 0.2, -1.0, 0.1])
    actions, extras, _ = call(lambda x: Categorical(logits=logits.expand(500, 5)), n=500)
    action = actions["action",]
    assert set(action.tolist()) == set(range(5))
    expected = Categorical(logits=logits).log_prob(action)
    assert torch.allclose(extras["action_log_prob",], expected)


@pytest.mark.parametrize(
    ("make", "action", "mode"),
    [
        (lambda: Categorical(logits=torch.tensor([[0.0, 3, 1, 2, 0]] * N)), "discrete", [1] * N),
        (lambda: Independent(Normal(torch.full((N, 2), 0.25), 1.0), 1), "box", [[0.25] * 2] * N),
        (
            lambda: Independent(Bernoulli(torch.tensor([[0.9, 0.1, 0.8]] * N)), 1),
            "multibinary",
            [[1, 0, 1]] * N,
        ),
    ],
    ids=["categorical", "normal", "bernoulli"],
)
def test_deterministic_takes_the_mode(make: Any, action: str, mode: Any) -> None:
    kwargs = {"action": action, "exploration": Exploration.DETERMINISTIC}
    actions, extras, _ = call(lambda x: make(), **kwargs)
    assert actions["action",].tolist() == mode
    assert torch.allclose(extras["action_log_prob",], make().log_prob(torch.tensor(mode).float()))
    assert extras["action_log_prob",].shape == (N,)


def test_distribution_with_extras() -> None:
    policy = lambda x: (Categorical(logits=torch.ones(N, 5)), {"value": x[:, 0]})  # noqa: E731
    _, extras, arrays = call(policy)
    assert set(extras) == {("value",), ("action_log_prob",)}
    assert torch.equal(extras["value",], torch.from_numpy(arrays["observation",][:, 0]))


def probabilistic() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 5), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            return_log_prob=True,
        ),
    )


@pytest.mark.parametrize("exploration", Exploration)
def test_probabilistic_tensordict_policies(exploration: Exploration) -> None:
    policy = probabilistic()
    nn.init.zeros_(policy[0].module.weight)
    actions, extras, _ = call(policy, n=200, exploration=exploration)
    assert set(extras) == {("logits",), ("action_log_prob",)}
    drawn = set(actions["action",].tolist())
    mode = int(policy[0].module.bias.argmax())
    assert drawn == ({mode} if exploration is Exploration.DETERMINISTIC else set(range(5)))


@pytest.mark.parametrize(
    "value",
    ["random", "RANDOM", Exploration.RANDOM, InteractionType.RANDOM, "torchrl"],
)
def test_exploration_types(value: Any) -> None:
    if value == "torchrl":
        utils = pytest.importorskip("torchrl.envs.utils")
        assert Exploration.of(utils.ExplorationType.DETERMINISTIC) is Exploration.DETERMINISTIC
        value = utils.ExplorationType.RANDOM
    assert Exploration.of(value) is Exploration.RANDOM


@pytest.mark.parametrize("value", ["mean", InteractionType.MEAN, None, 1])
def test_unknown_exploration_types(value: Any) -> None:
    with pytest.raises(dc.ArgumentError, match="use 'random'"):
        Exploration.of(value)


# What doesn't fit.

_BOX, _LONG = torch.zeros(N, 2), torch.zeros(N, dtype=torch.int64)


@pytest.mark.parametrize(
    ("policy", "action", "message"),
    [
        (lambda x: torch.zeros(N, 3), "box", r"shape \[3, 3\] .* need shape \[3, 2\]"),
        (lambda x: _BOX.long(), "box", r"dtype int64, but .* dtype float32"),
        (lambda x: _LONG.float(), "discrete", r"dtype float32, but .* dtype int64"),
        (lambda x: _BOX + 1j, "box", "dtype complex64"),
        (lambda x: torch.zeros(N, 5), "discrete", "logits or a one-hot vector"),
        (lambda x: torch.tensor(1), "discrete", "leading dimension of envs"),
        (lambda x: 1, "discrete", "leading dimension of envs"),
        (lambda x: torch.zeros(2), "box", "leading dimension of envs"),
        (lambda x: torch.zeros(1, 2), "box", "leading dimension of envs"),
        (lambda x: _LONG[:, None], "discrete", r"squeeze\(-1\)"),
        (lambda x: _LONG[:2], "discrete", r"shape \[2\] .* need shape \[3\]"),
        (lambda x: None, "discrete", "returned None"),
        (lambda x: "left", "discrete", "returned str"),
        (lambda x: (_LONG, {"observation": x}), "discrete", "'observation', a name that is taken"),
        (lambda x: (_LONG, {"reward": x}), "discrete", "'reward', a name that is taken"),
        (lambda x: (_LONG, {"done": x}), "discrete", "'done', a name that is taken"),
        (lambda x: (_LONG, {"v": torch.zeros(())}), "discrete", r"'v' of shape \[\]; its first"),
        (lambda x: (_LONG, {"v": x[:2]}), "discrete", r"'v' of shape \[2, 4\]; its first"),
        (lambda x: (_LONG, {"v": None}), "discrete", "'v'"),
        (lambda x: (_LONG, {"v": {"w": x}}), "discrete", "'v"),
        (lambda td: td, "discrete", "wrote no 'action'; it wrote nothing"),
        (lambda td: td.set("act", _LONG), "discrete", "wrote no 'action'; it wrote 'act'"),
        (lambda td: td.set("action", _LONG), "dict", "wrote no 'action"),
        (lambda x: 1 / 0, "discrete", "raised ZeroDivisionError: division by zero"),
        (nn.Linear(3, 1), "discrete", "raised RuntimeError: mat1 and mat2"),
    ],
)
def test_misfits(policy: Any, action: str, message: str) -> None:
    with pytest.raises(dc.PolicyError, match=f"(?s){message}"):
        call(policy, action=action)


def test_a_shape_that_changes_later() -> None:
    shapes = iter([(N, 2), (N, 2), (N, 3)])
    bound, _ = bind(lambda x: torch.zeros(next(shapes)), action="box")
    bound()
    bound()
    with pytest.raises(dc.PolicyError, match=r"shape \[3, 3\]"):
        bound()


def test_misfits_are_found_at_construction() -> None:
    for message, make in {
        "one-hot": lambda: dc.SyncDataCollector(
            "CartPole-v1", lambda x: torch.zeros(1, 2), frames_per_batch=4
        ),
        "policy_factory raised ZeroDivisionError": lambda: dc.SyncDataCollector(
            "CartPole-v1", policy_factory=lambda: 1 / 0, frames_per_batch=4
        ),
    }.items():
        with pytest.raises(dc.PolicyError, match=message):
            make()


# Random actions.


@pytest.mark.parametrize("action", counting.ACTIONS)
def test_random_policy(action: str) -> None:
    """Each env draws from its own generator, which only its own seed sets."""
    space = counting.ACTIONS[action]

    def draws(seeds: list[int]) -> list[list[bytes]]:
        policy = RandomPolicy(space, len(seeds))
        policy.seed(seeds)
        rows: list[list[bytes]] = [[] for _ in seeds]
        for _ in range(20):
            actions, extras = policy()
            assert not extras
            for leaf, value in zip(leaves_of(space, "action"), actions, strict=True):
                assert value.shape == (len(seeds), *leaf.shape)
                assert value.dtype == leaf.dtype
                for row, part in zip(rows, value.numpy(), strict=True):
                    row.append(part.tobytes())
        return rows

    one, two, three = draws([1, 2, 3])
    assert len({str(one), str(two), str(three)}) == 3
    assert draws([3]) == [three]
    state = str(space.np_random.bit_generator.state)
    draws([4])
    assert str(space.np_random.bit_generator.state) == state, "drawn from the env's own generator"


def test_no_gradients_and_no_inference_mode_while_exploring() -> None:
    flags: list[tuple[bool, bool]] = []

    def policy(x: torch.Tensor) -> torch.Tensor:
        flags.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return pick(x)

    with dc.SyncDataCollector("CartPole-v1", lambda x: policy(x) % 2, frames_per_batch=4) as one:
        one.next()
    assert set(flags) == {(False, False)}
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "policy",
    [
        lambda x: torch.full((len(x), 2), 0.5, requires_grad=True),
        lambda x: torch.full((len(x), 2), 0.5, dtype=torch.bfloat16),
        lambda x: torch.full((len(x), 2), 0.5, dtype=torch.float64),
        lambda x: (x[:, :2] * 0 + 0.5, {"h": x.to(torch.bfloat16)}),
        lambda x: (x[:, :2] * 0 + 0.5, {"h": x.clone().requires_grad_()}),
    ],
    ids=["needs grad", "bfloat16", "float64", "bfloat16 extra", "extra needs grad"],
)
def test_unusual_tensors_from_a_policy(policy: Any) -> None:
    maker = counting.CountingMaker(action="box")
    with dc.SyncDataCollector(maker, policy, frames_per_batch=4) as collector:
        batch = collector.next()
    assert batch["action"].dtype == torch.float32
    assert (batch["action"] == 0.5).all()
    assert not batch["action"].requires_grad
    if "h" in batch.keys():  # noqa: SIM118 - a TensorDict's own "in" looks at values
        assert not batch["h"].requires_grad
        assert torch.equal(batch["h"], batch["observation"].to(batch["h"].dtype))


def test_a_policy_may_change_its_input() -> None:
    """What it does to it shows nowhere in the batch."""

    def policy(x: torch.Tensor) -> torch.Tensor:
        action = pick(x)
        x.fill_(-1)
        return action

    with dc.SyncDataCollector(
        partial(counting.CountingEnv, 3), policy, frames_per_batch=20
    ) as collector:
        batch = collector.next()
    assert (batch["observation"][:, 0] == 3).all()
    assert torch.equal(batch["action"], pick(batch["observation"]))


def test_a_policy_may_take_its_input_apart() -> None:
    def policy(observation: dict[str, Any]) -> torch.Tensor:
        return observation.pop("inner").pop("echo") % 5

    call(policy, "dict")


# Travelling to workers.


def _in_main() -> type[nn.Module]:
    """A class as a script or a notebook defines it: no worker can import it."""
    module = types.ModuleType("__main__")
    exec(
        """
import torch
from torch import nn

OFFSET = 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
    def forward(self, observation):
        return (self.net(observation)[:, 0].long() + OFFSET) % 2
""",
        module.__dict__,
    )
    made: type[nn.Module] = module.Net
    assert made.__module__ == "__main__"
    return made


def test_code_travels() -> None:
    """A class from __main__, in a closure, in a lambda; an env maker likewise."""
    net, told = _in_main()(), 7

    def make_env(context: Any) -> gym.Env[Any, Any]:
        class Shifted(gym.ObservationWrapper):
            def observation(self, observation: Any) -> Any:
                return observation * 0 + told + context.worker_id

        return Shifted(gym.make("CartPole-v1"))

    with dc.RPCDataCollector(
        make_env,
        policy_factory=lambda: lambda x: (net(x), {"told": x[:, 0]}),
        frames_per_batch=8,
        num_workers=2,
        sync=True,
    ) as collector:
        batch = collector.next()
    assert batch["observation"][:, 0, 0].tolist() == [7, 8]
    assert batch["told"][:, 0].tolist() == [7, 8]
    expected = net(batch["observation"].reshape(-1, 4)).reshape(2, -1)
    assert torch.equal(batch["action"], expected)


def test_what_cannot_travel() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(dc.PolicyNotSendable, match="policy_factory"):
        dc.RPCDataCollector("CartPole-v1", lambda x: lock, frames_per_batch=8, num_workers=1)
    with pytest.raises(dc.ArgumentError, match="create_env_fn can't be sent"):
        dc.RPCDataCollector(lambda: lock, None, frames_per_batch=8, num_workers=1)


class Keeping(nn.Module):
    """Keeps a tensor in some place, and notes whether it was called in inference mode."""

    def __init__(self, keep: Callable[[Keeping, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.shelf: dict[str, list[Any]] = {"top": [types.SimpleNamespace(drawer=None)]}
        self.keep = keep
        self.modes: list[bool] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.modes.append(torch.is_inference_mode_enabled())
        self.calls += 1
        logits = self.linear(observation)
        self.keep(self, logits)
        return logits.argmax(-1)


def _in_an_attribute(module: Keeping, value: torch.Tensor) -> None:
    module.linear.last = value


def _deep_inside(module: Keeping, value: torch.Tensor) -> None:
    module.shelf["top"][0].drawer = (value,)


def _as_a_buffer(module: Keeping, value: torch.Tensor) -> None:
    module.register_buffer("last", value)


def _nowhere(module: Keeping, value: torch.Tensor) -> None:
    """It is forgotten."""


@pytest.mark.parametrize(
    ("keep", "fast"),
    [(_nowhere, True), (_in_an_attribute, False), (_deep_inside, False), (_as_a_buffer, False)],
)
def test_a_shared_module_gets_inference_mode_if_it_keeps_no_tensor(keep: Any, fast: bool) -> None:
    module = Keeping(keep)
    bound, _ = bind(module, shared=True)
    bound.try_out()
    with bound.exploring():
        bound()
    assert module.modes == [False, fast]
    # Nothing that it holds now stops it from being trained.
    kept = getattr(module.linear, "last", torch.zeros(N, 5))
    (module.linear(torch.ones(N, 4)) * kept * module.calls).sum().backward()


def test_a_shared_function_may_keep_anything_anywhere() -> None:
    modes = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return pick(observation)

    bound, _ = bind(policy, shared=True)
    bound.try_out()
    with bound.exploring():
        bound()
    assert modes == [False, False]


def test_a_copy_always_gets_inference_mode() -> None:
    module = Keeping(_in_an_attribute)
    bound, _ = bind(module)
    bound.try_out()
    assert module.modes == [True]
