"""Reads action, extras and state from what the user's policy returns."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch.distributions import Distribution

from distcollect.errors import PolicyError
from distcollect.policy.base import Exploration, is_discrete
from distcollect.policy.calling import to_tensor
from distcollect.rollout.spaces import (
    RESERVED,
    Key,
    Leaf,
    dtype_name,
    flatten,
    leaves_of,
    overlaps,
)

log = logging.getLogger(__name__)

_NOTHING: Mapping[Any, Any] = {}  # beside the action
# Action, extras, and the state before the next frame: ``[n, *shape]`` for each leaf.
Read: TypeAlias = tuple[Sequence[np.ndarray], Sequence[np.ndarray], Sequence[np.ndarray]]

_LOG_PROBS = ("action_log_prob", "sample_log_prob")  # TorchRL's names, the second the older one


class Column:
    """An entry of what the policy returns.

    Attributes:
        name: its name there.
        leaf: what it is in a frame.
        shape: its shape for all envs, ``[n, *leaf.shape]``.
        dtype: of its arrays.
    """

    def __init__(self, name: Any, leaf: Leaf, num_envs: int) -> None:
        """Describe the entry ``name`` of ``num_envs`` envs."""
        self.name, self.leaf = name, leaf
        self.shape, self.dtype = (num_envs, *leaf.shape), leaf.numpy_dtype

    def fitted(self, value: Any) -> np.ndarray | None:
        """Return ``value`` as an array whose numbers the leaf's dtype can hold.

        None: it has another shape, or is an integer instead of a float, or the reverse. Floats and
        integers may have another width.

        Args:
            value: a tensor, or what torch makes one of.

        Raises:
            PolicyError: torch can't make a tensor of it, or it has an integer that is out of range.
        """
        tensor, wanted = to_tensor(value, self.leaf.key), self.leaf.dtype
        if tensor.shape != self.shape or _kind(tensor.dtype) != _kind(wanted):
            return None
        if not any(_kind(wanted)) and tensor.dtype is not wanted and tensor.numel():
            limits = None if wanted is torch.bool else torch.iinfo(wanted)
            low, high = (0, 1) if limits is None else (limits.min, limits.max)
            for number in (int(tensor.min()), int(tensor.max())):
                if not low <= number <= high:
                    raise PolicyError(
                        f"the policy returned {number} in {'.'.join(self.leaf.key)!r}, which is of "
                        f"dtype {dtype_name(wanted)} and holds {low} to {high}"
                    )
        array: np.ndarray = tensor.numpy()
        return array


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


class OutputReader:
    """Turns what the policy returns into arrays, and checks that they fit.

    A returned TensorDict, and a value with a dict of extras, are both read by key.
    """

    def __init__(
        self,
        action_space: gym.Space[Any],
        num_envs: int,
        *,
        input_keys: Collection[Key],
        state: Sequence[Leaf],
        state_at_root: Collection[Key] = (),
        exploration: Exploration,
        is_noisy: bool = False,
    ) -> None:
        """Read outputs for ``num_envs`` envs.

        Args:
            action_space: of a single env.
            num_envs: n.
            input_keys: keys of the policy's inputs, which extras can't have.
            state: what a recurrent policy returns for its next call.
            state_at_root: keys of those that it writes at the root of a TensorDict.
            exploration: how to choose actions where the policy returns a distribution.
            is_noisy: the actions get noise, so the policy may return no distribution.
        """
        self._action_space = action_space
        self._num_envs = num_envs
        self._input_keys = input_keys
        self._exploration = exploration
        self._is_noisy = is_noisy
        self._actions = [
            Column(leaf.key, leaf, num_envs) for leaf in leaves_of(action_space, "action")
        ]
        self._state_leaves = state
        self._state_at_root = state_at_root
        # Action, extras and state; what follows is known after the first call.
        self._columns = self._actions
        self._names: list[Any] | None = None  # of extras and state
        self._forms: list[Any] = []  # dtype and shape of each
        self._parts = 0, 0  # where extras begin and end
        self._action_is_leaf = self._actions[0].name == ("action",)
        # With such a space, a pair of a value and a dict is an action, not an action with extras.
        self._action_is_pair_with_dict = (
            isinstance(action_space, gym.spaces.Tuple)
            and len(action_space) == 2
            and isinstance(action_space[1], gym.spaces.Dict)
        )

    @property
    def extras(self) -> tuple[Leaf, ...]:
        """Leaves that the policy returns besides the action; known after the first call."""
        return tuple(column.leaf for column in self._columns[slice(*self._parts)])

    def read(self, output: Any) -> Read:
        """Return action, extras, and the state before the next frame.

        Raises:
            PolicyError: ``output`` is of no accepted kind, does not fit the action space, or has
                other extras than the first time, or extras of another shape or kind of dtype.
        """
        values: Sequence[Any]
        if type(output) is torch.Tensor and self._action_is_leaf:
            values, written = (output,), _NOTHING  # at once, as the other questions take long
        else:
            values, written = self._split(output)
        if self._names is None:
            self._learn(values, written)
        if self._names:
            try:
                values = [*values, *[written[name] for name in self._names]]
            except KeyError:
                raise self._changed(written) from None
        if written is not output and len(written) != len(self._names or ()):
            raise self._changed(written)
        try:
            arrays = [value.numpy() for value in values]
            fits = [(array.dtype, array.shape) for array in arrays] == self._forms
        except (AttributeError, RuntimeError, TypeError):  # no tensor, a gradient, on a GPU
            fits = False
        if not fits:
            arrays = [*map(self._fitted, self._columns, values)]
        if not self._names:
            return arrays, (), ()
        first, last = self._parts
        return arrays[:first], arrays[first:last], arrays[last:]

    def _split(self, output: Any) -> tuple[Sequence[Any], Mapping[Any, Any]]:
        """Return the parts of an action or distribution, and what stands beside it, by name.

        A TensorDict stands beside its own action.
        """
        written = _NOTHING
        is_pair = type(output) is tuple and len(output) == 2
        if is_pair and not self._action_is_pair_with_dict and isinstance(output[1], Mapping):
            output, written = output
        if isinstance(output, Distribution):
            output, log_prob = self._sample(output)
            if _LOG_PROBS[0] in written:
                raise _taken((_LOG_PROBS[0],))
            written = {**written, _LOG_PROBS[0]: log_prob}
        if self._action_is_leaf and type(output) is torch.Tensor:
            return (output,), written
        if not written and isinstance(output, TensorDictBase):
            try:
                return [output[column.name] for column in self._actions], output
            except (KeyError, ValueError):  # or the action is no branch, or no leaf
                raise self._no_action(output) from None
        if self._action_is_leaf:
            if isinstance(output, Mapping) or (type(output) is tuple and _has_tensors(output)):
                raise PolicyError(
                    f"the policy returned a {type(output).__name__} of {len(output)}, but the "
                    f"action space is {self._action_space}: return the action, or with a dict of "
                    "what else the frames are to have: (action, {'value': value})"
                )
            return (output,), written
        try:
            return list(flatten(self._action_space, output)), written
        except (IndexError, KeyError, TypeError, ValueError) as err:
            raise PolicyError(
                f"the policy returned {'None' if output is None else type(output).__name__}, but "
                f"the action space is {self._action_space}: return a dict or tuple of that "
                "structure"
            ) from err

    def _sample(self, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an action of the distribution, and its log-probability."""
        if self._is_noisy:
            raise _noisy(f"returned a distribution, {type(distribution).__name__},")
        action = self._exploration.choose(distribution)
        if self._names is None and Exploration.DETERMINISTIC.find_action(distribution) is None:
            log.warning(
                "the policy's distribution, %s, has no mode or mean: evaluate() needs "
                "deterministic=False",
                type(distribution).__name__,
            )
        log_prob = distribution.log_prob(action)
        column = self._actions[0]
        if log_prob.ndim > 1 and action.shape == column.shape:
            name = type(distribution).__name__
            raise PolicyError(
                f"the policy returned a distribution {name} whose log-probability has shape "
                f"{list(log_prob.shape)}, and it must be one number for each env, "
                f"{[self._num_envs]}: return torch.distributions.Independent({name}(...), "
                f"{log_prob.ndim - 1}) instead"
            )
        # Bernoulli and similar distributions draw whole numbers as floats.
        if action.is_floating_point() and is_discrete(distribution):
            action = action.to(column.leaf.dtype)
        return action, log_prob

    def _learn(self, values: Sequence[Any], written: Mapping[Any, Any]) -> None:
        """Find the extras and the state in what the policy returned in the first call."""
        for column, value in zip(self._actions, values, strict=True):
            self._fitted(column, value)
        taken = {*self._input_keys, *(column.leaf.key for column in self._actions)}
        is_td = isinstance(written, TensorDictBase)
        keys = [
            ("next", *leaf.key) if is_td and leaf.key not in self._state_at_root else leaf.key
            for leaf in self._state_leaves
        ]
        state = [
            Column(key if len(key) > 1 else key[0], leaf, self._num_envs)
            for key, leaf in zip(keys, self._state_leaves, strict=True)
        ]
        if missing := [c.leaf.key for c in state if written.get(c.name, None) is None]:
            raise PolicyError(
                f"the policy returned no {_dotted(missing)}: it must return its whole state each "
                'time, under the same names; a TensorDict policy writes it under "next"'
            )
        known = {*keys} | (taken if is_td else set())
        extras = []
        for name in _names(written):
            key = _key(name)
            if key in known:
                continue
            if self._is_noisy and key[-1] in _LOG_PROBS:
                raise _noisy(f"writes {'.'.join(key)!r}")
            if overlaps(key, taken) or key[0] in RESERVED:
                raise _taken(key)
            taken.add(key)
            value = to_tensor(written[name], key)
            if value.shape[:1] != (self._num_envs,):
                raise PolicyError(
                    f"the policy writes {'.'.join(key)!r} of shape {list(value.shape)}; its first "
                    f"dimension must be the {self._num_envs} envs"
                )
            leaf = Leaf(key, tuple(value.shape[1:]), value.dtype)
            extras.append(Column(name, leaf, self._num_envs))
        self._columns = [*self._actions, *extras, *state]
        self._names = [column.name for column in (*extras, *state)]
        self._forms = [(column.dtype, column.shape) for column in self._columns]
        self._parts = len(self._actions), len(self._columns) - len(state)

    def _no_action(self, output: TensorDictBase) -> PolicyError:
        written = [*map(_key, _names(output))]
        missing = [column.name for column in self._actions if column.name not in written]
        others = [key for key in written if key not in self._input_keys]
        return PolicyError(
            f"the policy wrote no {_dotted(missing)}; it wrote {_dotted(others) or 'nothing'}. "
            "Its out_keys must name the action's entries"
        )

    def _changed(self, written: Mapping[Any, Any]) -> PolicyError:
        before = [column.leaf.key for column in self._columns[len(self._actions) :]]
        return PolicyError(
            f"the policy wrote {_dotted(map(_key, _names(written))) or 'nothing'} beside the "
            f"action, but {_dotted(before) or 'nothing'} the first time: these must not change"
        )

    def _fitted(self, column: Column, value: Any) -> np.ndarray:
        """Return ``value`` as :meth:`.Column.fitted` does; PolicyError if it does not fit."""
        array = column.fitted(value)
        if array is not None:
            return array
        leaf, shape, space = column.leaf, column.shape, self._action_space
        got = to_tensor(value, leaf.key)
        how, needs, end = "wrote", "of ", " the first time: these must not change"
        if leaf in self._state_leaves:
            how, end = "returned the state", " at the start of episodes"
        elif leaf in [column.leaf for column in self._actions]:
            how, needs, end = (
                "returned",
                f"{self._num_envs} env(s) with action space {space} need ",
                "",
            )
            if isinstance(space, gym.spaces.Discrete) and got.shape[1:] == (int(space.n),):
                end = "; these look like logits or a one-hot vector: return the action's index"
            elif got.shape == shape:
                end = "; convert it, as with action.to(torch." + dtype_name(leaf.dtype) + ")"
            elif got.shape in {leaf.shape, (1, *leaf.shape)}:
                end = "; the policy always sees, and returns, a leading dimension of envs"
            elif got.shape == (*shape, 1):
                end = "; drop the last dimension, as with squeeze(-1)"
        raise PolicyError(
            f"the policy {how} {'.'.join(leaf.key)!r} of shape {list(got.shape)} and dtype "
            f"{dtype_name(got.dtype)}, but {needs}shape {list(shape)} and dtype "
            f"{dtype_name(leaf.dtype)}{end}"
        )


def _has_tensors(parts: Sequence[Any]) -> bool:
    return any(isinstance(part, torch.Tensor) and part.ndim for part in parts)


def _taken(key: Key) -> PolicyError:
    return PolicyError(f"the policy writes {'.'.join(key)!r}, a name that is taken; rename it")


def _noisy(does: str) -> PolicyError:
    return PolicyError(
        f"the policy {does} but gets exploration noise, and the log-probability would not be that "
        "of the action: return the mode or mean of a distribution, without log-probability, or "
        "leave out the noise, as a distribution explores by itself"
    )


def _names(written: Mapping[Any, Any]) -> Iterable[Any]:
    """Return the names of all tensors that a policy wrote."""
    if isinstance(written, TensorDictBase):
        names: Iterable[Any] = written.keys(include_nested=True, leaves_only=True)
        return names
    return written


def _key(name: Any) -> Key:
    return tuple(map(str, name)) if isinstance(name, tuple) else (str(name),)


def _dotted(keys: Iterable[Key]) -> str:
    return ", ".join(repr(".".join(key)) for key in keys)
