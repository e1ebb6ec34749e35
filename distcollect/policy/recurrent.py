"""Keeps what a recurrent policy carries from one frame of an episode to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from distcollect.common.random_state import random_state_restored
from distcollect.errors import PolicyError
from distcollect.policy.calling import Tensors, parameters_of, to_tensor
from distcollect.policy.live_weights import buffers_restored
from distcollect.policy.splitmix import SplitMixStreams
from distcollect.policy.weight_layout import module_of
from distcollect.rollout.spaces import RESERVED, Arrays, Key, Leaf, as_key, nested, overlaps

IS_INIT = Leaf(("is_init",), (1,), torch.bool)
IS_FIRST: Key = ("", "is_first")  # no env or policy has such a key


class PolicyState:
    """The hidden state of n envs before their next frames.

    Attributes:
        entries: leaves of the state.
        leaves: the same, and ``is_init`` if the policy reads it.
        at_root: keys that the policy writes at the root, not under "next".
        arrays: ``[n, *shape]`` for each of ``leaves``. The arrays are rewritten, never replaced.
        carried: the same, and under ``IS_FIRST`` bool ``[n, 1]``: the next frame is the first.
    """

    def __init__(
        self,
        num_envs: int,
        initial: Callable[[], Tensors],
        *,
        has_is_init: bool,
        at_root: Collection[Key],
    ) -> None:
        """Start with all envs at the start of an episode.

        Args:
            num_envs: n.
            initial: returns the state at the start of episodes, ``[n, *shape]`` for each entry.
            has_is_init: add ``is_init``, bool ``[n, 1]``: True in the first frame of an episode.
            at_root: see the class.
        """
        self.at_root = at_root
        self._initial = initial
        self.entries = tuple(
            Leaf(key, tuple(value.shape[1:]), value.dtype) for key, value in initial().items()
        )
        self.leaves = (*self.entries, IS_INIT) if has_is_init else self.entries
        self.arrays: Arrays = {leaf.key: leaf.zeros(num_envs) for leaf in self.leaves}
        self._is_first = self.arrays[IS_INIT.key] if has_is_init else IS_INIT.zeros(num_envs)
        self.carried: Arrays = {**self.arrays, IS_FIRST: self._is_first}
        self.draw_from(None)
        self.begin(range(num_envs))

    def draw_from(
        self,
        streams: SplitMixStreams | None,
        drawing: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Draw the state at the start of episodes from these streams from now on.

        Args:
            streams: those that the policy draws from; None: torch's own generators.
            drawing: makes the context in which that state is computed.
        """
        self._streams, self._drawing = streams, drawing
        self._num_drawn = 0  # numbers that the last frame has drawn

    def begin(self, rows: Sequence[int]) -> None:
        """Set the state of ``rows`` to the start of an episode."""
        rows = list(rows)
        if not rows:
            return
        if self._streams is not None:  # however often, and in which rows, episodes begin here
            self._streams.num_drawn = self._num_drawn
        for key, initial in self.initial().items():
            self.arrays[key][rows] = initial[rows]
        self._is_first[rows] = True

    def initial(self) -> Arrays:
        """Compute the state at the start of an episode, ``[n, *shape]`` for each entry."""
        with self._drawing():
            initial = self._initial()
        return {leaf.key: initial[leaf.key].numpy() for leaf in self.entries}

    def renew(self) -> None:
        """Begin again where no frame was made yet: the state may be learned, and weights new."""
        rows = self._is_first[:, 0].nonzero()[0].tolist()
        if self.entries:
            self.begin(rows)

    def advance(self, new: Sequence[np.ndarray], rows: Sequence[int] | None = None) -> None:
        """Replace the state after an action was chosen.

        Args:
            new: ``[n, *shape]`` for each of ``entries``; without any, they stay as they are.
            rows: the envs whose action was chosen; None: all.
        """
        where = slice(None) if rows is None else list(rows)
        for leaf, value in zip(self.entries, new, strict=False):
            self.arrays[leaf.key][where] = value[where]
        self._is_first[where] = False
        if self._streams is not None:
            self._num_drawn = self._streams.num_drawn

    def skip(self, rows: Sequence[int] | None) -> None:
        """Random actions are taken in ``rows``, None: in all: the state stays as it is."""
        if self._streams is not None:
            self._streams.next_frame(rows)
        self.advance((), rows)


def state_of(
    policy: Callable[..., Any], inputs: Tensors, context: AbstractContextManager[Any]
) -> PolicyState | None:
    """Return the state that ``policy`` carries from frame to frame; None if it is not recurrent.

    A policy is recurrent if it has a method ``initial_state(num_envs)``, or is a TensorDictModule
    that reads an entry and writes it under "next". Such a module without that method is called
    once without a state, as TorchRL's modules allow, to learn the shapes; its state starts as
    zeros. A policy that only reads ``is_init`` has a state of no other entries. TorchRL's
    OrnsteinUhlenbeckProcessModule carries its noise under keys that it does not declare.

    Args:
        policy: the user's policy.
        inputs: its other inputs, ``[n, *shape]``.
        context: the context in which to call it.

    Raises:
        PolicyError: the state at the start of an episode can't be determined, or an entry has a
            name that is taken.
    """
    num_envs = len(next(iter(inputs.values())))
    carried: list[Key] = []
    at_root: list[Key] = []
    if isinstance(policy, TensorDictModuleBase):
        reads = [as_key(key) for key in policy.in_keys]
        written = {as_key(key) for key in policy.out_keys}
        carried = [key for key in reads if ("next", *key) in written]
        processes: list[Any] = [getattr(part, "ou", None) for part in policy.modules()]
        noisy = [each for each in processes if hasattr(each, "noise_key")]
        at_root = [as_key(key) for each in noisy for key in (each.noise_key, each.steps_key)]
        reads += [IS_INIT.key] * bool(noisy)
    else:
        reads = [(parameter.name,) for parameter in parameters_of(policy)]
    reads_is_init = IS_INIT.key in reads and IS_INIT.key not in inputs
    initial: Callable[[], Tensors] = dict
    if callable(getattr(policy, "initial_state", None)):
        _check_layout(policy, num_envs)
        initial = partial(_call_initial_state, policy, num_envs)
    elif carried or at_root:
        initial = partial(dict, _zero_state(policy, inputs, carried, at_root, context))
    elif not reads_is_init:
        return None
    state = PolicyState(num_envs, initial, has_is_init=reads_is_init, at_root=at_root)
    for key in state.arrays:
        if overlaps(key, inputs) or key[0] in RESERVED:
            raise PolicyError(
                f"the policy has a state {'.'.join(key)!r}, a name that is taken; rename it"
            )
    if missing := [key for key in carried if key not in state.arrays]:
        raise PolicyError(
            f"the policy reads {'.'.join(missing[0])!r} and writes it under 'next', but its "
            "initial_state() has no such entry: add it there"
        )
    return state


def _check_layout(policy: Any, num_envs: int) -> None:
    """Raise PolicyError if its state fits only as another dimension is as long as that of the envs.

    Such as nn.LSTM's ``[layers, n, H]`` with n layers. Which one it is shows with another n.
    """
    with random_state_restored():
        shapes = {k: v.shape for k, v in _call_initial_state(policy, num_envs).items()}
        try:
            of_more = _entries(policy, num_envs + 1)
        except PolicyError:
            return  # it is made for this n
    changed = {k: v for k, v in of_more.items() if v.shape != shapes.get(k, v.shape)}
    _check_rows(changed, num_envs + 1)


def _call_initial_state(policy: Any, num_envs: int) -> Tensors:
    """Return the state at the start of an episode, from the policy's ``initial_state``."""
    state = _entries(policy, num_envs)
    _check_rows(state, num_envs)
    return state


def _entries(policy: Any, num_envs: int) -> Tensors:
    try:
        with torch.no_grad():
            entries = policy.initial_state(num_envs)
    except Exception as error:
        raise PolicyError(
            f"the policy's initial_state() raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(entries, Mapping):
        raise PolicyError(
            f"the policy's initial_state() returned a {type(entries).__name__}; it must be a dict "
            "of tensors by name"
        )
    return {as_key(name): to_tensor(value, as_key(name)) for name, value in entries.items()}


def _check_rows(state: Tensors, num_envs: int) -> None:
    for key, value in state.items():
        if value.shape[:1] != (num_envs,):
            is_second = value.shape[1:2] == (num_envs,)
            hint = ": transpose(0, 1), here and where the policy reads and returns it" * is_second
            raise PolicyError(
                f"the policy's initial_state({num_envs}) has {'.'.join(key)!r} of shape "
                f"{list(value.shape)}; its first dimension must be the {num_envs} envs{hint}"
            )


def _zero_state(
    policy: Callable[..., Any],
    inputs: Tensors,
    carried: Sequence[Key],
    at_root: Sequence[Key],
    context: AbstractContextManager[Any],
) -> Tensors:
    """Return zeros of the shapes that ``policy`` writes under "next" for the keys ``carried``.

    And of those that it writes ``at_root``, if it does: noise only where actions are drawn.
    """
    some = next(iter(inputs.values()))
    first = {IS_INIT.key: torch.ones(len(some), 1, dtype=torch.bool), **inputs}
    td = TensorDict(nested(first), batch_size=[len(some)], device=some.device)
    try:
        with random_state_restored(), buffers_restored(module_of(policy)), context:
            written = policy(td)
        state = {key: written["next"][key] for key in carried}
        state |= {key: written[key] for key in at_root if key in written.keys(True, True)}
        return {key: torch.zeros_like(to_tensor(value, key)) for key, value in state.items()}
    except Exception as error:
        raise PolicyError(
            f"the policy carries {', '.join(repr('.'.join(key)) for key in carried)} from frame to "
            f"frame, but without them it raised {type(error).__name__}: {error}; give it a method "
            "initial_state(num_envs) that returns a dict of their first values"
        ) from error
