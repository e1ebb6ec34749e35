"""Reads action and extras from what the user's policy returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from torch.distributions import Distribution

from distcollect.errors import PolicyError
from distcollect.policy.base import Exploration, PolicyOutput
from distcollect.policy.calling import Tensors, to_tensor
from distcollect.policy.per_env_rng import PerEnvRng, draw
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import (
    RESERVED,
    Key,
    Leaf,
    as_key,
    dtype_name,
    flatten,
    leaves_of,
    overlaps,
)

_ActionAndExtras: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class OutputReader:
    """Turns what the policy returns into arrays, and checks that they fit.

    Attributes:
        extras: leaves that the policy returns besides the action; known after the first call.
        next_state: ``[n, *shape]`` for each entry of the state after the last call; empty if the
            policy is not recurrent.
        rng: where actions are drawn from; None: torch's own generators.
    """

    def __init__(
        self,
        action_space: gym.Space[Any],
        num_envs: int,
        *,
        input_keys: Collection[Key],
        state: PolicyState | None,
        exploration: Exploration,
    ) -> None:
        """Read outputs for ``num_envs`` envs.

        Args:
            action_space: of a single env.
            num_envs: n.
            input_keys: keys of the policy's inputs, which extras can't have.
            state: of a recurrent policy.
            exploration: how to choose actions where the policy returns a distribution.
        """
        self.extras: tuple[Leaf, ...] = ()
        self.next_state: Tensors = {}
        self.rng: PerEnvRng | None = None
        self._action_space = action_space
        self._num_envs = num_envs
        self._input_keys = input_keys
        self._state = state
        self._exploration = exploration
        self._leaves = leaves_of(action_space, "action")
        self._shapes = [torch.Size((num_envs, *leaf.shape)) for leaf in self._leaves]
        self._action_is_leaf = [leaf.key for leaf in self._leaves] == [("action",)]
        # With such a space, a pair of a value and a dict is an action, not an action with extras.
        self._action_is_pair_with_dict = (
            isinstance(action_space, gym.spaces.Tuple)
            and len(action_space) == 2
            and isinstance(action_space[1], gym.spaces.Dict)
        )
        self._extra_keys: list[Key] | None = None  # known after the first call, as the next
        self._extra_specs: list[tuple[torch.Size, torch.dtype]] = []
        # Takes the extras out of a dict; only where no value has to be converted.
        self._extras_of: Callable[[Any], Sequence[torch.Tensor]] | None = None

    def read(self, output: Any) -> PolicyOutput:
        """Action and extras.

        Raises:
            PolicyError: ``output`` is of no accepted kind, does not fit the action space, or has
                other extras than the first time, or extras of another shape or kind of dtype.
        """
        # A fast path with one call, for what most policies return: with a small policy it halves
        # the overhead. The first call has checked everything closely.
        if self._extras_of is not None and type(output) is tuple and len(output) == 2:
            action, written = output
            if (
                type(action) is torch.Tensor
                and action.shape == self._shapes[0]
                and action.dtype is self._leaves[0].dtype
                and type(written) is dict
                and len(written) == len(self.extras)
            ):
                arrays = self._as_before(self._extras_of, written)
                if arrays is not None:
                    return (action.numpy(),), arrays
        if isinstance(output, TensorDictBase):
            actions, extras = self._from_tensordict(output)
        else:
            actions, extras = self._from_value(output)
        for index, action in enumerate(actions):
            if action.shape != self._shapes[index]:
                raise self._action_error(self._leaves[index], action)
            if action.dtype is not self._leaves[index].dtype:
                _check_range(self._leaves[index], action)
        for value, (shape, _), leaf in zip(extras, self._extra_specs, self.extras, strict=True):
            _check_extra(leaf, value, shape)
        return [action.numpy() for action in actions], [value.numpy() for value in extras]

    def _as_before(
        self, extras_of: Callable[[Any], Sequence[torch.Tensor]], written: Mapping[str, Any]
    ) -> Sequence[np.ndarray] | None:
        """The extras in ``written``; None if they are not exactly of the kind that they were."""
        try:
            extras = extras_of(written)
        except KeyError:
            return None
        arrays = []
        for value, (shape, dtype) in zip(extras, self._extra_specs):  # noqa: B905 - it takes long
            if type(value) is not torch.Tensor or value.shape != shape or value.dtype is not dtype:
                return None
            arrays.append(value.numpy())
        return arrays

    def _from_value(self, output: Any) -> _ActionAndExtras:
        """Action and extras from a returned action, pair, or distribution."""
        written: Mapping[str, Any] = {}
        if type(output) is tuple and len(output) == 2 and not self._action_is_pair_with_dict:
            first, second = output
            if isinstance(second, Mapping):
                output, written = first, second
        if self._state is not None:
            entries = {leaf.key[0] for leaf in self._state.entries}
            self._keep_state({(name,): written[name] for name in entries if name in written})
            written = {name: written[name] for name in written if name not in entries}
        if isinstance(output, Distribution):
            output, log_prob = self._sample(output)
            written = {**written, "action_log_prob": log_prob}
        actions = [to_tensor(output, "action")] if self._action_is_leaf else self._parts(output)
        if self._extra_keys is None:
            extras: Tensors = {(str(name),): to_tensor(written[name], name) for name in written}
            self._register(actions, extras)
            # The fast path converts nothing, so the values must be tensors as they are.
            values = [output, *written.values()]
            is_usual = self._action_is_leaf and written and self._state is None
            if is_usual and all(to_tensor(value, "") is value for value in values):
                self._extras_of = _values_getter(list(written))
        assert self._extra_keys is not None
        if len(written) != len(self._extra_keys):
            raise self._extras_error((name,) for name in written)
        try:
            return actions, [to_tensor(written[name], name) for (name, *_) in self._extra_keys]
        except KeyError:
            raise self._extras_error((name,) for name in written) from None

    def _parts(self, output: Any) -> list[torch.Tensor]:
        """The leaves of an action from a Dict or Tuple space."""
        try:
            parts = list(flatten(self._action_space, output))
        except (IndexError, KeyError, TypeError, ValueError) as err:
            raise PolicyError(
                f"the policy returned {_type_name(output)}, but the action space is "
                f"{self._action_space}: return a dict or tuple of that structure"
            ) from err
        return [
            to_tensor(part, ".".join(leaf.key))
            for leaf, part in zip(self._leaves, parts, strict=True)
        ]

    def _from_tensordict(self, output: TensorDictBase) -> _ActionAndExtras:
        """Action and extras from a returned TensorDict."""
        if self._state is not None:
            keys = [leaf.key for leaf in self._state.entries]
            next_values = {key: output.get(("next", *key), None) for key in keys}
            self._keep_state({k: value for k, value in next_values.items() if value is not None})
        if self._extra_keys is None:
            self._register_from_tensordict(output)
        assert self._extra_keys is not None
        try:
            return (
                [to_tensor(output[leaf.key], leaf.key) for leaf in self._leaves],
                [to_tensor(output[key], key) for key in self._extra_keys],
            )
        except KeyError:
            written = [as_key(name) for name in output.keys(include_nested=True, leaves_only=True)]
            raise self._extras_error(written) from None

    def _register_from_tensordict(self, output: TensorDictBase) -> None:
        written = {
            as_key(name): value
            for name, value in output.items(include_nested=True, leaves_only=True)
        }
        wanted = [leaf.key for leaf in self._leaves]
        known = {*wanted, *self._input_keys, *(("next", *key) for key in self.next_state)}
        extras = {key: to_tensor(value, key) for key, value in written.items() if key not in known}
        if missing := [key for key in wanted if key not in written]:
            raise PolicyError(
                f"the policy wrote no {_dotted(missing)}; it wrote {_dotted(extras) or 'nothing'}. "
                "Its out_keys must name the action's entries"
            )
        self._register([to_tensor(written[key], key) for key in wanted], extras)

    def _keep_state(self, new: Mapping[Key, Any]) -> None:
        """Keep the state that the policy reads in the next frame."""
        assert self._state is not None
        if missing := [leaf.key for leaf in self._state.entries if leaf.key not in new]:
            raise PolicyError(
                f"the policy returned no {_dotted(missing)}: it must return its whole state each "
                'time, under the same names; a TensorDict policy writes it under "next"'
            )
        self.next_state = {key: to_tensor(value, key) for key, value in new.items()}

    def _extras_error(self, written: Iterable[Key]) -> PolicyError:
        return PolicyError(
            f"the policy wrote {_dotted(written) or 'nothing'} beside the action, but "
            f"{_dotted(self._extra_keys or ()) or 'nothing'} the first time: these must not change"
        )

    def _sample(self, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
        """An action of the distribution, and its log-probability."""
        if self._exploration is Exploration.RANDOM:
            action = draw(distribution.sample, self.rng)
        else:
            action = self._exploration.choose(distribution)
        log_prob = distribution.log_prob(action)
        if log_prob.ndim > 1 and action.shape == self._shapes[0]:
            raise self._log_prob_error(distribution, log_prob)
        # Bernoulli and similar distributions draw whole numbers as floats.
        if action.is_floating_point() and getattr(distribution.support, "is_discrete", False):
            action = action.to(self._leaves[0].dtype)
        return action, log_prob

    def _log_prob_error(self, distribution: Distribution, got: torch.Tensor) -> PolicyError:
        name = type(distribution).__name__
        return PolicyError(
            f"the policy returned a distribution {name} whose log-probability has shape "
            f"{list(got.shape)}, and it must be one number for each env, {[self._num_envs]}: "
            f"return torch.distributions.Independent({name}(...), {got.ndim - 1}) instead"
        )

    def _register(self, actions: Sequence[torch.Tensor], extras: Tensors) -> None:
        """Check the result of the first call, and expect its extras from every later call."""
        for leaf, action, shape in zip(self._leaves, actions, self._shapes, strict=True):
            # Floats and integers of another width are converted; an integer instead of a
            # float, or the reverse, is a mistake.
            got = action.dtype
            other_kind = got.is_floating_point != leaf.dtype.is_floating_point or got.is_complex
            if action.shape != shape or other_kind:
                raise self._action_error(leaf, action)
        taken = {*self._input_keys, *(leaf.key for leaf in self._leaves)}
        for key, value in extras.items():
            if overlaps(key, taken) or key[0] in RESERVED:
                raise PolicyError(
                    f"the policy writes {'.'.join(key)!r}, a name that is taken; rename it"
                )
            if value.ndim == 0 or value.shape[0] != self._num_envs:
                raise PolicyError(
                    f"the policy writes {'.'.join(key)!r} of shape {list(value.shape)}; its first "
                    f"dimension must be the {self._num_envs} envs"
                )
        self.extras = tuple(
            Leaf(key, tuple(value.shape[1:]), value.dtype) for key, value in extras.items()
        )
        self._extra_keys = list(extras)
        self._extra_specs = [(value.shape, value.dtype) for value in extras.values()]

    def _action_error(self, leaf: Leaf, got: torch.Tensor) -> PolicyError:
        hint = ""
        discrete = isinstance(self._action_space, gym.spaces.Discrete)
        if discrete and got.shape[1:] == (int(self._action_space.n),):  # type: ignore[attr-defined]
            hint = "; these look like logits or a one-hot vector: return the action's index"
        elif got.shape in {leaf.shape, (1, *leaf.shape)}:
            hint = "; the policy always sees, and returns, a leading dimension of envs"
        elif got.shape == (self._num_envs, *leaf.shape, 1):
            hint = "; drop the last dimension, as with squeeze(-1)"
        return PolicyError(
            f"the policy returned {'.'.join(leaf.key)!r} of shape {list(got.shape)} and dtype "
            f"{dtype_name(got.dtype)}, but {self._num_envs} env(s) with action space "
            f"{self._action_space} need shape {[self._num_envs, *leaf.shape]} and dtype "
            f"{dtype_name(leaf.dtype)}{hint}"
        )


def _check_extra(leaf: Leaf, value: torch.Tensor, shape: torch.Size) -> None:
    """Raise PolicyError for an extra that the leaf's memory can't hold."""
    got = value.dtype
    other_kind = got.is_floating_point != leaf.dtype.is_floating_point
    if value.shape != shape or other_kind or got.is_complex != leaf.dtype.is_complex:
        raise PolicyError(
            f"the policy wrote {'.'.join(leaf.key)!r} of shape {list(value.shape)} and dtype "
            f"{dtype_name(got)}, but of shape {list(shape)} and dtype {dtype_name(leaf.dtype)} the "
            "first time: these must not change"
        )
    if got is not leaf.dtype:
        _check_range(leaf, value)


def _check_range(leaf: Leaf, given: torch.Tensor) -> None:
    """Raise PolicyError for an integer that the leaf's dtype cannot hold."""
    whole = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    if not whole or given.is_floating_point() or not given.numel():
        return
    limits = None if leaf.dtype is torch.bool else torch.iinfo(leaf.dtype)
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    for value in (int(given.min()), int(given.max())):
        if not low <= value <= high:
            raise PolicyError(
                f"the policy returned {value} in {'.'.join(leaf.key)!r}, which is of dtype "
                f"{dtype_name(leaf.dtype)} and holds {low} to {high}"
            )


def _values_getter(names: Sequence[str]) -> Callable[[Any], Sequence[torch.Tensor]]:
    """A function that returns the values of ``names`` in a dict."""
    if len(names) == 1:
        name = names[0]
        return lambda written: (written[name],)
    return itemgetter(*names)


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _dotted(keys: Iterable[Key]) -> str:
    return ", ".join(repr(".".join(key)) for key in keys)
