"""A policy of any accepted kind as one callable, from observation leaves to action and extras."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type
from torch import nn
from torch.distributions import Distribution

from distcollect.errors import PolicyError
from distcollect.policy.base import Exploration, Policy
from distcollect.policy.calling import (
    Inputs,
    Tensors,
    as_key,
    calling_convention,
    keeps_tensors,
    to_tensor,
)
from distcollect.policy.per_env_rng import RowNoise
from distcollect.policy.recurrent import state_of
from distcollect.rollout.spaces import RESERVED, Arrays, Key, Leaf, dtype_name, flatten, leaves_of

log = logging.getLogger(__name__)


class UserPolicy(Policy):
    """The user's policy, of whatever kind."""

    def __init__(
        self,
        policy: Callable[..., Any],
        observation: Arrays,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        exploration: Exploration = Exploration.RANDOM,
        device: torch.device | None = None,
        shared: bool = False,
    ) -> None:
        """Bind ``policy`` to the arrays from which it will read.

        Args:
            policy: TensorDictModule, module or callable.
            observation: ``{key: [n, *shape]}``, the same arrays at every step.
            observation_space: of a single env.
            action_space: of a single env.
            exploration: for policies that have, or return, a distribution.
            device: moves the policy there; None leaves it where it is.
            shared: the user trains this very object. Tensors that it keeps must then do for
                autograd, as those of inference mode, which is faster, don't.

        Raises:
            PolicyError: no way to call it with these observations, or its state can't be told.
        """
        if isinstance(policy, nn.Module):
            self.module = policy if device is None else policy.to(device)
        self._policy = policy
        self._exploration = exploration
        self._feeds_autograd = shared
        self._action_space = action_space
        self._leaves = leaves_of(action_space, "action")
        # Then a pair that ends in a dict is an action, not an action with extras.
        self._ends_in_dict = (
            isinstance(action_space, gym.spaces.Tuple)
            and len(action_space) == 2
            and isinstance(action_space[1], gym.spaces.Dict)
        )
        self._num_envs = len(next(iter(observation.values())))
        self._shapes = [torch.Size((self._num_envs, *leaf.shape)) for leaf in self._leaves]
        self._is_leaf = [leaf.key for leaf in self._leaves] == [("action",)]
        self._inputs = Inputs(observation, self.module, device)
        self.state = state_of(policy, self._inputs.tensors, self.exploring())
        self._next_state: Tensors = {}
        if self.state is not None:
            self._inputs = Inputs({**observation, **self.state.arrays}, self.module, device)
        self._call = calling_convention(policy, self._inputs, observation_space)
        self._names: list[Key] | None = None  # of the extras; known after the first call
        self._pick: Callable[[Any], Sequence[torch.Tensor]] | None = None
        self._noise: RowNoise | None = None  # torch's own generators

    def seed(self, seeds: Sequence[int]) -> None:
        self._noise = RowNoise(seeds)

    def exploring(self) -> AbstractContextManager[Any]:
        """No gradients, and the exploration type set for TensorDict policies."""
        without_gradients = torch.no_grad() if self._feeds_autograd else torch.inference_mode()
        return _Exploring(without_gradients, self._exploration)

    def try_out(self) -> None:
        """As :meth:`Policy.try_out`; a shared module that keeps nothing gets inference mode."""
        if not self._feeds_autograd or self.module is None:
            super().try_out()
            return
        keeps_others = keeps_tensors(self.module)
        super().try_out()
        self._feeds_autograd = keeps_others()

    def __call__(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if self._noise is not None:
            self._noise.next_frame()
        chosen = self._choose()
        if self.state is not None:
            self.state.advance(self._next_state)
        return chosen

    def for_rows(
        self, rows: Sequence[int]
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if self._noise is not None:
            self._noise.next_frame(rows)
        if self.state is None:
            return self._choose()
        before = {key: array.copy() for key, array in self.state.arrays.items()}
        chosen = self._choose()
        self.state.advance(self._next_state)
        others = [row for row in range(self._num_envs) if row not in rows]
        for key, array in self.state.arrays.items():
            array[others] = before[key][others]
        return chosen

    def _choose(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if self._inputs.copies:
            self._inputs.refresh()
        try:
            output = self._call() if self._noise is None else self._drawing(self._call)
        except Exception as error:
            raise PolicyError(f"the policy raised {type(error).__name__}: {error}") from error
        # What most policies return, with no call in between: for a small policy that is half of
        # what we cost. The first call has looked at everything closely.
        if self._pick is not None and type(output) is tuple and len(output) == 2:
            action, written = output
            if (
                type(action) is torch.Tensor
                and action.shape == self._shapes[0]
                and type(written) is dict
                and len(written) == len(self.extras)
            ):
                try:
                    return (action,), self._pick(written)
                except KeyError:
                    log.debug("the policy wrote other extras than before")
        if isinstance(output, TensorDictBase):
            actions, extras = self._from_tensordict(output)
        else:
            actions, extras = self._from_value(output)
        for index, action in enumerate(actions):
            if action.shape != self._shapes[index]:
                raise self._misfit(self._leaves[index], action)
        return actions, extras

    def _drawing(self, call: Callable[[], Any]) -> Any:
        """Call what may draw. As little as can be: within the noise every operation costs more."""
        if self._noise is None:
            return call()
        with self._noise:
            return call()

    def _from_value(self, output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        written: Mapping[str, Any] = {}
        if type(output) is tuple and len(output) == 2 and not self._ends_in_dict:
            head, tail = output
            if isinstance(tail, Mapping):
                output, written = head, tail
        if self.state is not None:
            entries = {leaf.key[0] for leaf in self.state.entries}
            self._keep_state({(name,): written[name] for name in entries if name in written})
            written = {name: written[name] for name in written if name not in entries}
        if isinstance(output, Distribution):
            output, log_prob = self._sample(output)
            written = {**written, "action_log_prob": log_prob}
        actions = [to_tensor(output, "action")] if self._is_leaf else self._parts(output)
        if self._names is None:
            self._learn(actions, {(str(name),): to_tensor(written[name], name) for name in written})
            # Where nothing had to be converted, that is left out from now on.
            given = [output, *written.values()]
            usual = self._is_leaf and written and self.state is None
            if usual and all(to_tensor(v, "") is v for v in given):
                self._pick = _picker(list(written))
        assert self._names is not None
        if len(written) != len(self._names):
            raise self._other_extras((name,) for name in written)
        try:
            return actions, [to_tensor(written[name], name) for (name, *_) in self._names]
        except KeyError:
            raise self._other_extras((name,) for name in written) from None

    def _parts(self, output: Any) -> list[torch.Tensor]:
        try:
            parts = list(flatten(self._action_space, output))
        except (IndexError, KeyError, TypeError, ValueError) as err:
            raise PolicyError(
                f"the policy returned {_kind(output)}, but the action space is "
                f"{self._action_space}: return a dict or tuple of that structure"
            ) from err
        return [
            to_tensor(part, ".".join(leaf.key))
            for leaf, part in zip(self._leaves, parts, strict=True)
        ]

    def _from_tensordict(
        self, output: TensorDictBase
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self.state is not None:
            keys = [leaf.key for leaf in self.state.entries]
            following = [output.get(("next", *key), None) for key in keys]
            given = zip(keys, following, strict=True)
            self._keep_state({key: value for key, value in given if value is not None})
        if self._names is None:
            self._learn_from_tensordict(output)
        assert self._names is not None
        try:
            return (
                [to_tensor(output[leaf.key], leaf.key) for leaf in self._leaves],
                [to_tensor(output[name], name) for name in self._names],
            )
        except KeyError:
            written = [as_key(name) for name in output.keys(include_nested=True, leaves_only=True)]
            raise self._other_extras(written) from None

    def _learn_from_tensordict(self, output: TensorDictBase) -> None:
        written = {
            as_key(name): value
            for name, value in output.items(include_nested=True, leaves_only=True)
        }
        wanted = [leaf.key for leaf in self._leaves]
        known = {*wanted, *self._inputs.tensors, *(("next", *key) for key in self._next_state)}
        extras = {key: to_tensor(value, key) for key, value in written.items() if key not in known}
        if missing := [key for key in wanted if key not in written]:
            raise PolicyError(
                f"the policy wrote no {_dotted(missing)}; it wrote {_dotted(extras) or 'nothing'}. "
                "Its out_keys must name the action's entries"
            )
        self._learn([to_tensor(written[key], key) for key in wanted], extras)

    def _keep_state(self, given: Mapping[Key, Any]) -> None:
        """Keep what the policy wants to be told in the next frame."""
        assert self.state is not None
        if missing := [leaf.key for leaf in self.state.entries if leaf.key not in given]:
            raise PolicyError(
                f"the policy returned no {_dotted(missing)}: it must return its whole state each "
                'time, by the names that it starts with; a TensorDict policy writes it under "next"'
            )
        self._next_state = {key: to_tensor(value, key) for key, value in given.items()}

    def _other_extras(self, written: Iterable[Key]) -> PolicyError:
        return PolicyError(
            f"the policy wrote {_dotted(written) or 'nothing'} beside the action, but "
            f"{_dotted(self._names or ()) or 'nothing'} the first time: it must always be the same"
        )

    def _sample(self, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
        if self._exploration is Exploration.RANDOM:
            action = self._drawing(distribution.sample)
        else:
            action = distribution.mode
        log_prob = distribution.log_prob(action)
        # Bernoulli and its like draw whole numbers as floats.
        if action.is_floating_point() and getattr(distribution.support, "is_discrete", False):
            action = action.to(self._leaves[0].dtype)
        return action, log_prob

    def _learn(self, actions: Sequence[torch.Tensor], extras: Tensors) -> None:
        """Check what the first call gave, and take its extras as those of every call."""
        for leaf, action, shape in zip(self._leaves, actions, self._shapes, strict=True):
            # A narrower or wider type of the same kind is converted; another kind is a mistake.
            got = action.dtype
            other_kind = got.is_floating_point != leaf.dtype.is_floating_point or got.is_complex
            if action.shape != shape or other_kind:
                raise self._misfit(leaf, action)
        taken = {*self._inputs.tensors, *(leaf.key for leaf in self._leaves)}
        for key, value in extras.items():
            if key in taken or key[0] in RESERVED:
                raise PolicyError(
                    f"the policy writes {'.'.join(key)!r}, a name that is taken; call it otherwise"
                )
            if value.ndim == 0 or value.shape[0] != self._num_envs:
                raise PolicyError(
                    f"the policy writes {'.'.join(key)!r} of shape {list(value.shape)}; its first "
                    f"dimension must be the {self._num_envs} envs"
                )
        self.extras = tuple(
            Leaf(key, tuple(value.shape[1:]), value.dtype) for key, value in extras.items()
        )
        self._names = list(extras)

    def _misfit(self, leaf: Leaf, got: torch.Tensor) -> PolicyError:
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


def _picker(names: Sequence[str]) -> Callable[[Any], Sequence[torch.Tensor]]:
    """Takes the values of ``names`` out of a dict."""
    if len(names) == 1:
        name = names[0]
        return lambda written: (written[name],)
    return itemgetter(*names)


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


class _Exploring:
    """No gradients and an interaction type, entered once for a rollout."""

    def __init__(
        self, without_gradients: AbstractContextManager[Any], exploration: Exploration
    ) -> None:
        self._contexts = (without_gradients, set_interaction_type(exploration.interaction))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)


def _dotted(keys: Iterable[Key]) -> str:
    return ", ".join(repr(".".join(key)) for key in keys)
