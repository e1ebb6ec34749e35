"""Spaces as flat leaves, and values flattened and restored."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from distcollect.errors import SpaceError
from distcollect.rollout.spaces import (
    RESERVED,
    Leaf,
    indexable,
    leaves_of,
    torch_dtype,
)


def test_keys() -> None:
    box = spaces.Box(0, 1, (2,))
    tree = spaces.Dict({"a": box, "b": spaces.Tuple((box, spaces.Dict({"c": box})))})

    def keys(space: gym.Space[Any], role: str) -> list[str]:
        return [".".join(leaf.key) for leaf in leaves_of(space, role)]

    assert keys(box, "observation") == ["observation"]
    assert keys(box, "action") == ["action"]
    assert keys(tree, "observation") == ["a", "b.0", "b.1.c"]
    assert keys(tree, "action") == ["action.a", "action.b.0", "action.b.1.c"]
    assert keys(spaces.Tuple((box, box)), "observation") == ["observation.0", "observation.1"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Box(0, 1), None),
        spaces.OneOf([spaces.Discrete(2)]),
    ],
)
def test_spaces_without_a_fixed_shape(space: gym.Space[Any]) -> None:
    name = type(space).__name__
    with pytest.raises(SpaceError, match=f"observation: a {name} space"):
        leaves_of(space, "observation")
    with pytest.raises(SpaceError, match=f"in.ner: a {name} space"):
        leaves_of(spaces.Dict({"in": spaces.Dict({"ner": space})}), "observation")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names(name: str) -> None:
    space = spaces.Dict({name: spaces.Discrete(2)})
    with pytest.raises(SpaceError, match=repr(name)):
        leaves_of(space, "observation")
    assert leaves_of(space, "action") == (Leaf(("action", name), (), torch.int64),)
    inner = spaces.Dict({"x": space})
    assert leaves_of(inner, "observation") == (Leaf(("x", name), (), torch.int64),)


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
DTYPES += ["uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_can_be_written_by_index(dtype: str) -> None:
    values = torch.tensor([0, 1, 1]).to(torch_dtype(np.dtype(dtype)))
    into = torch.zeros_like(values)
    indexable(into)[torch.tensor([2, 0])] = indexable(values[1:])
    assert torch.equal(into.to(torch.int64), torch.tensor([1, 0, 1]))
    indexable(into)[torch.tensor([True, False, False])] = indexable(values[:1])
    assert torch.equal(into.to(torch.int64), torch.tensor([0, 0, 1]))


def test_dtype_that_torch_does_not_have() -> None:
    space = spaces.Dict({"far": spaces.Box(-1, 1, (2,), np.longdouble)})
    with pytest.raises(SpaceError, match="far: torch has no dtype"):
        leaves_of(space, "observation")


def test_byte_order_is_this_machines() -> None:
    space = spaces.Box(-1, 1, (2,), np.dtype(">f4"))  # type: ignore[arg-type]
    assert leaves_of(space, "observation") == (Leaf(("observation",), (2,), torch.float32),)
