"""The inputs that policies of every kind get."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.envs import SamplingEnv
from helpers.policy_binding import Module, N, bind, call, pick
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

import distcollect as dc
from distcollect.rollout.spaces import Key


def noted(observation: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"note": observation * 2, "flag": observation[:, 0] > 0}


class ModuleWithExtras(nn.Module):
    def forward(self, observation: torch.Tensor) -> Any:
        return pick(observation), noted(observation)


class Callables:
    def __call__(self, whatever_name: torch.Tensor) -> torch.Tensor:
        return pick(whatever_name)

    def method(self, observation: torch.Tensor) -> Any:
        return pick(observation), noted(observation)


class AnnotatedCall:
    def __call__(self, inputs: TensorDictBase) -> None:
        inputs.set("action", pick(inputs["observation"]))


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
    bound, observed = bind(policy)
    for value in range(3):  # it sees each new observation
        observed["observation",][:] = np.arange(N)[:, None] + value
        assert bound()[0][0].tolist() == [(row + value) * 4 % 5 for row in range(N)]
    actions, extras, arrays = call(policy)
    observation = torch.from_numpy(arrays["observation",])
    assert set(actions) == {("action",)}
    assert torch.equal(actions["action",].long(), pick(observation))
    assert set(extras) == wanted
    if "lambda" not in kind and wanted:
        assert torch.equal(extras["note",], observation * 2)
        assert torch.equal(extras["flag",], observation[:, 0] > 0)


# What a policy makes of a Dict observation, and the entries that it gets for that.
SEEN: list[tuple[Callable[..., Any], list[Key]]] = [
    (lambda place: [place], [("place",)]),
    (lambda image, place: [image, place], [("image",), ("place",)]),
    (
        lambda inner: [inner["echo"], inner["pair"]["1"]],
        [("inner", "echo"), ("inner", "pair", "1")],
    ),
    (lambda whole, place: [whole["inner"]["echo"], place], [("inner", "echo"), ("place",)]),
    (lambda place, scale=2.0: [place / scale * 2], [("place",)]),
    (lambda **entries: [entries["image"], entries["place"]], [("image",), ("place",)]),
    (lambda *, place: [place], [("place",)]),
    (lambda place, /: [place], [("place",)]),
]


@pytest.mark.parametrize(("policy", "keys"), SEEN)
def test_dict_observations_by_parameter_names(policy: Callable[..., Any], keys: list[Key]) -> None:
    seen: list[Any] = []

    def acting(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen[:] = policy(*args, **kwargs)
        return torch.zeros(N, dtype=torch.int64)

    acting.__wrapped__ = policy  # type: ignore[attr-defined]  # gives it the policy's signature
    _, _, arrays = call(acting, "dict")
    for value, key in zip(seen, keys, strict=True):
        assert torch.equal(value, torch.from_numpy(arrays[key]))


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


def test_a_first_parameter_of_another_name_beside_an_entry(caplog: Any) -> None:
    def misnamed(picture: Any, place: torch.Tensor) -> torch.Tensor:
        return torch.zeros(N, dtype=torch.int64)

    call(misnamed, "dict")
    said = "'picture' gets the whole observation, as no entry has this name: image, inner, place"
    assert said in caplog.text


def test_tuple_observations() -> None:
    def policy(observation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = observation
        assert first.shape == (N, 3)
        return second % 5

    actions, _, arrays = call(policy, "tuple")
    assert actions["action",].tolist() == (arrays["observation", "1"] % 5).tolist()


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.full((2,), 0.7)),
        (torch.zeros(2, dtype=torch.uint8), torch.full((2,), 300)),
        (torch.zeros(2, 2), torch.tensor([1.0, 2.0])),
        (torch.zeros(2), torch.tensor(5.0)),
        (torch.zeros(2, 1), torch.zeros(1, 1)),
        (torch.zeros(2), torch.zeros(3)),
    ],
    ids=["kind", "range", "rank", "scalar", "one for all", "length"],
)
def test_extras_that_change(first: torch.Tensor, later: torch.Tensor) -> None:
    written = iter([first, first, later])
    bound, _ = bind(lambda x: (torch.zeros(2, dtype=torch.int64), {"note": next(written)}), n=2)
    bound()
    bound()
    with pytest.raises(dc.PolicyError, match="'note'"):
        bound()


def test_extras_of_another_width_are_converted() -> None:
    written = iter([torch.zeros(2)] * 2 + [torch.full((2,), 0.5, dtype=torch.float64)] * 4)

    def policy(observation: torch.Tensor) -> Any:
        return torch.zeros(2, dtype=torch.int64), {"note": next(written)}

    with dc.SyncDataCollector(
        SamplingEnv, policy, frames_per_batch=8, envs_per_worker=2
    ) as collector:
        batch = collector.next()
    assert batch["note"].dtype is torch.float32
    assert (batch["note"][:, 1:] == 0.5).all()


class DrawsOfAllKinds(TensorDictModuleBase):
    """Draws from the global generators of torch, NumPy and Python, also without a state."""

    in_keys = ("observation", "hidden")
    out_keys = ("action", "draws", ("next", "hidden"))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        draws = [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
        td["action"] = torch.zeros(len(td), dtype=torch.int64)
        self.num_calls += 1
        td["draws"] = torch.tensor(draws, dtype=torch.float64).expand(len(td), 3)
        td["next", "hidden"] = torch.zeros(len(td), 1)
        return td


def seed_all() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def test_trying_the_policy_leaves_generators_and_buffers_as_they_are() -> None:
    """So a script that seeds them first sees the same actions as in a loop of its own."""
    policy = DrawsOfAllKinds()
    seed_all()
    with dc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=3) as collector:
        assert policy.num_calls == 0
        drawn = collector.next()["draws"]
    assert policy.num_calls == 3
    seed_all()
    for row in drawn:
        assert row.tolist() == [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002
