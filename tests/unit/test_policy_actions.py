"""What policies may return: actions, distributions, extras; and the errors for anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from helpers.counting_envs import ACTIONS, OBSERVATIONS, CountingMaker
from helpers.policy_binding import N, bind, call, observations, pick
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Distribution,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    Uniform,
)

import distcollect as dc
from distcollect.policy.base import Exploration
from distcollect.policy.random import RandomPolicy
from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import leaves_of


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
    assert list(actions) == [leaf.key for leaf in leaves_of(ACTIONS[action], "action")]
    assert torch.equal(next(iter(actions.values())), chosen % 3)
    assert set(extras) == ({("note",)} if policy is _tuple_with_extras else set())


def test_a_tuple_action_that_ends_with_a_dict_is_no_extras() -> None:
    space = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"force": spaces.Box(-1, 1, (2,))})))
    observation = OBSERVATIONS["box32"].space
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


class Dtypes(nn.Module):
    def __init__(self, parameter: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = None if parameter is None else nn.Parameter(parameter)
        self.seen = torch.empty(0)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.seen = observation.clone()
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
    array = arrays["observation",]
    for _ in range(2):
        before = array.copy()
        bound()
        assert torch.equal(policy.seen, torch.from_numpy(before).to(expected))
        assert policy.seen.dtype is expected
        assert (array == before).all()
        array[:] = 1  # what is cast follows


def test_distributions_are_drawn_from() -> None:
    logits = torch.tensor([0.0, 0.5, 0.2, -1.0, 0.1])
    actions, extras, _ = call(lambda x: Categorical(logits=logits.expand(500, 5)), n=500)
    action = actions["action",]
    assert set(action.tolist()) == set(range(5))
    expected = Categorical(logits=logits).log_prob(action)
    assert torch.allclose(extras["action_log_prob",], expected)


def tanh_normal() -> TransformedDistribution:
    return TransformedDistribution(Normal(torch.zeros(N, 2), 1.0), [TanhTransform()])


def _torchrls_tanh_normal() -> Any:
    modules = pytest.importorskip("torchrl.modules")
    return modules.TanhNormal(torch.zeros(N, 2), torch.ones(N, 2))


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
        (
            lambda: Independent(Bernoulli(torch.tensor([[0.9, 0.5, 0.5]] * N)), 1),
            "multibinary",
            [[1, 0, 0]] * N,
        ),
        (lambda: Independent(tanh_normal(), 1), "box", [[0.0] * 2] * N),
        (_torchrls_tanh_normal, "box", [[0.0] * 2] * N),
        (lambda: Independent(Uniform(torch.zeros(N, 2), 1.0), 1), "box", [[0.5] * 2] * N),
    ],
    ids=["categorical", "normal", "bernoulli", "undecided", "tanh", "torchrl", "uniform"],
)
def test_deterministic_takes_the_mode_or_mean(make: Any, action: str, mode: Any) -> None:
    kwargs = {"action": action, "exploration": Exploration.DETERMINISTIC}
    actions, extras, _ = call(lambda x: make(), **kwargs)
    assert actions["action",].tolist() == mode
    assert torch.allclose(extras["action_log_prob",], make().log_prob(torch.tensor(mode).float()))
    assert extras["action_log_prob",].shape == (N,)


def test_the_mode_of_one_env_does_not_depend_on_others() -> None:
    """Where it is not defined, that env's action is the mean."""
    some, flat = torch.tensor([[2.0, 3.0]]), torch.ones(1, 2)

    def chosen(alpha: torch.Tensor, beta: torch.Tensor) -> Any:
        return Exploration.DETERMINISTIC.choose(Independent(Beta(alpha, beta), 1)).tolist()

    [alone] = chosen(some, 2 * some)
    assert chosen(torch.cat([some, flat]), torch.cat([2 * some, flat])) == [alone, [0.5, 0.5]]


@pytest.mark.parametrize(
    ("make", "action", "match"),
    [
        (lambda: Normal(torch.zeros(N, 2), 1.0), "box", rf"\[{N}, 2\].*Independent\(Normal"),
        (
            lambda: Categorical(logits=torch.zeros(N, 2, 3)),
            "multidiscrete",
            rf"\[{N}, 2\].*Independent\(Categorical\(\.\.\.\), 1\)",
        ),
    ],
)
def test_distribution_with_several_log_probabilities(make: Any, action: str, match: str) -> None:
    with pytest.raises(dc.PolicyError, match=match):
        call(lambda x: make(), action=action)


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


@pytest.mark.parametrize(
    "exploration", [Exploration.RANDOM, Exploration.DETERMINISTIC, Exploration.MODE]
)
def test_probabilistic_tensordict_policies(exploration: Exploration) -> None:
    policy = probabilistic()
    nn.init.zeros_(policy[0].module.weight)
    actions, extras, _ = call(policy, n=200, exploration=exploration)
    assert set(extras) == {("logits",), ("action_log_prob",)}
    drawn = set(actions["action",].tolist())
    mode = int(policy[0].module.bias.argmax())
    assert drawn == (set(range(5)) if exploration is Exploration.RANDOM else {mode})


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


@pytest.mark.parametrize("exploration", [Exploration.MEAN, Exploration.MEDIAN])
@pytest.mark.parametrize(
    ("make", "action"),
    [
        (lambda: Categorical(logits=torch.zeros(N, 5)), "discrete"),
        (lambda: Independent(Categorical(logits=torch.zeros(N, 2, 3)), 1), "multidiscrete"),
        (lambda: Independent(Bernoulli(torch.full((N, 3), 0.7)), 1), "multibinary"),
    ],
    ids=["categorical", "wrapped", "bernoulli"],
)
def test_a_distribution_of_whole_numbers_has_no_mean(
    exploration: Exploration, make: Any, action: str
) -> None:
    message = f"exploration_type='{exploration.value}': .*has no {exploration.value}; use 'mode'"
    with pytest.raises(dc.PolicyError, match=message):
        call(lambda x: make(), action=action, exploration=exploration)


def test_an_error_names_the_exploration_types_that_work() -> None:
    for kind, works in [
        (Exploration.MODE, "'median' or 'deterministic' or"),
        (Exploration.MEAN, ""),
    ]:
        with pytest.raises(dc.PolicyError, match=f"has no {kind.value}; use {works}.*'random'$"):
            kind.choose(tanh_normal())


class _OnlySamples(Distribution):
    def __init__(self, rows: int) -> None:
        super().__init__((rows,), validate_args=False)

    def sample(self, sample_shape: Any = ()) -> torch.Tensor:
        return torch.zeros(self.batch_shape, dtype=torch.int64)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.batch_shape)


def test_what_evaluate_needs_is_said_when_the_collector_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = lambda observation: _OnlySamples(len(observation))  # noqa: E731
    with dc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=10) as collector:
        assert "_OnlySamples, has no mode or mean: evaluate() needs determ" in caplog.text
        with pytest.raises(dc.PolicyError, match=r"'random', and evaluate\(deterministic=Fa"):
            collector.evaluate(num_episodes=1)
        assert len(collector.evaluate(num_episodes=1, deterministic=False).returns) == 1


def test_the_mean_of_a_broken_policy_is_no_question_of_exploration() -> None:
    broken = Normal(torch.full((N, 2), float("nan")), 1.0, validate_args=False)
    assert Exploration.MEAN.choose(broken).isnan().all()


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
        (lambda x: "left", "discrete", "returned str"),
        (lambda x: (_LONG, {"observation": x}), "discrete", "'observation', a name that is taken"),
        (lambda x: (_LONG, {"done": x}), "discrete", "'done', a name that is taken"),
        (lambda x: (_LONG, {"v": torch.zeros(())}), "discrete", r"'v' of shape \[\]; its first"),
        (lambda x: (_LONG, {"v": x[:2]}), "discrete", r"'v' of shape \[2, 4\]; its first"),
        (lambda x: (_LONG, {"v": None}), "discrete", "'v'"),
        (lambda x: (_LONG, {"v": {"w": x}}), "discrete", "'v"),
        (lambda td: td, "discrete", "wrote no 'action'; it wrote nothing"),
        (lambda td: td.set("act", _LONG), "discrete", "wrote no 'action'; it wrote 'act'"),
        (lambda td: td.set("action", _LONG), "dict", "wrote no 'action"),
        (lambda x: 1 / 0, "discrete", "raised ZeroDivisionError: division by zero"),
        (lambda x: Categorical(torch.ones(N - 1, 5)), "discrete", r"shape \[2\] .* need shape"),
        (nn.Linear(3, 1), "discrete", "raised RuntimeError: (addmm: )?mat1 and mat2"),
    ],
)
def test_misfits(policy: Any, action: str, message: str) -> None:
    with pytest.raises(dc.PolicyError, match=f"(?s){message}"):
        call(policy, action=action)


@pytest.mark.parametrize(
    ("later", "action", "message"),
    [
        (torch.zeros(N, 3), "box", r"shape \[3, 3\]"),
        (torch.full((N,), 0.7), "discrete", "dtype float32, but .* dtype int64"),
        (torch.full((N, 3), 300), "multibinary", "returned 300 in 'action', .* int8"),
    ],
)
def test_an_action_that_fits_no_more(later: torch.Tensor, action: str, message: str) -> None:
    space = ACTIONS[action]
    right = torch.zeros((N, *space.shape), dtype=torch.float32 if action == "box" else torch.int64)
    returned = iter([right, right, later])
    bound, _ = bind(lambda x: next(returned), action=action)
    bound()
    bound()
    with pytest.raises(dc.PolicyError, match=message):
        bound()


@pytest.mark.parametrize("action", ACTIONS)
def test_random_policy(action: str) -> None:
    """Each env draws from its own generator, which only its seed sets."""
    space = ACTIONS[action]

    def draws(seeds: list[int]) -> list[list[bytes]]:
        policy = RandomPolicy(space, len(seeds))
        policy.seed(seeds)
        rows: list[list[bytes]] = [[] for _ in seeds]
        for _ in range(20):
            actions, extras = policy()
            assert not extras
            for leaf, value in zip(leaves_of(space, "action"), actions, strict=True):
                assert value.shape == (len(seeds), *leaf.shape)
                assert value.dtype == leaf.numpy_dtype
                for row, part in zip(rows, value, strict=True):
                    row.append(part.tobytes())
        return rows

    one, two, three = draws([1, 2, 3])
    assert len({str(one), str(two), str(three)}) == 3
    assert draws([3]) == [three]
    state = str(space.np_random.bit_generator.state)
    draws([4])
    assert str(space.np_random.bit_generator.state) == state, "drawn from the env's own generator"


class WithState(nn.Module):
    """Its state is called ``inner``."""

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"inner": torch.zeros(num_envs, 3)}

    def forward(self, place: torch.Tensor, inner: torch.Tensor) -> Any:
        return _LONG, {"inner": inner + 1}


def written_to(key: Any) -> TensorDictModule:
    def act(place: torch.Tensor) -> Any:
        return torch.zeros(len(place), dtype=torch.int64), place + 1

    return TensorDictModule(act, in_keys=["place"], out_keys=["action", key])


@pytest.mark.parametrize(
    "policy", [lambda place: (_LONG, {"inner": place}), written_to("inner"), WithState()]
)
def test_an_entry_cannot_replace_a_branch_of_the_observation(policy: Any) -> None:
    with pytest.raises(dc.PolicyError, match="'inner', a name that is taken"):
        call(policy, "dict")


def test_an_entry_can_join_a_branch_of_the_observation() -> None:
    maker = CountingMaker(observation="dict")
    policy = written_to(("inner", "seen"))
    with dc.SyncDataCollector(maker, policy, frames_per_batch=4) as collector:
        batch = collector.next()
    assert torch.equal(batch["inner", "seen"], batch["place"] + 1)
    assert batch["inner", "echo"].shape == (4,)
