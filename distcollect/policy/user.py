"""Brings the user's policy, of any accepted kind, into the form of a :class:`Policy`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from tensordict.nn import set_interaction_type

from distcollect.errors import PolicyError, users_errors
from distcollect.policy.base import Exploration, Policy, PolicyOutput
from distcollect.policy.calling import Inputs, calling_convention, moved, raised
from distcollect.policy.noise import noises_of, without_noise
from distcollect.policy.normalize import Normalizer
from distcollect.policy.outputs import OutputReader, Read
from distcollect.policy.per_env_rng import PerEnvRng
from distcollect.policy.random import RandomPolicy
from distcollect.policy.recurrent import state_of
from distcollect.policy.weight_layout import has_lazy_weights, module_of
from distcollect.rollout.spaces import Arrays, Leaf


class UserPolicy(Policy):
    """The user's policy: a TensorDictModule, another module, or any callable."""

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
        normalizer: Normalizer | None = None,
    ) -> None:
        """Bind ``policy`` to the arrays from which it will read.

        Args:
            policy: TensorDictModule, module or callable.
            observation: ``{key: [n, *shape]}``, the arrays that the envs rewrite at every step.
            observation_space: of a single env.
            action_space: of a single env.
            exploration: how to choose actions where the policy has, or returns, a distribution.
            device: move the policy there; None: leave it where it is.
            shared: the user trains this object. Tensors that it keeps must then work in autograd,
                which tensors of inference mode don't, although inference mode is faster.
            normalizer: what the observations go through; None: nothing.

        Raises:
            PolicyError: the policy can't be called with these observations, its initial state
                can't be determined, or ``device`` can't be used here.
        """
        num_envs = len(next(iter(observation.values())))
        self._random = RandomPolicy(action_space, num_envs)  # of noise
        noises = noises_of(policy, action_space, num_envs, lambda rows: self._random(rows)[0])
        self.noises = noises if exploration is Exploration.RANDOM else []
        policy = without_noise(policy)
        self.module = module_of(policy)
        if self.module is not None and device is not None:
            self.module = moved(self.module, device)
        self._exploration = exploration
        self._needs_autograd = shared
        self._has_run = False
        self._rng: PerEnvRng | None = None
        self._make_inputs = partial(Inputs, observation, self.module, device, normalizer)
        self.state = state_of(policy, self._make_inputs().tensors, self.exploring())
        self._convention = partial(calling_convention, policy, observation_space=observation_space)
        self._bind(copies=False)
        if has_lazy_weights(self.module):
            # Its weights have no shape before its first call, and must not be inference tensors.
            with torch.no_grad():
                self._convention(inputs=self._inputs)()
        self._outputs = OutputReader(
            action_space,
            self._inputs.num_envs,
            input_keys=self._inputs.tensors,
            state=() if self.state is None else self.state.entries,
            exploration=exploration,
            is_noisy=bool(noises),
            state_at_root=() if self.state is None else self.state.at_root,
        )

    def _bind(self, *, copies: bool) -> None:
        """Have the policy called with new inputs, or with ``copies`` of them each time."""
        self._inputs = self._make_inputs()
        if self.state is not None:
            self._inputs.add(self.state.arrays)
        call = self._convention(inputs=self._inputs, copies=copies)
        self._call = call if self._has_run else partial(self._first, call)
        self._users = self._inputs.users()

    @property
    def extras(self) -> tuple[Leaf, ...]:
        return self._outputs.extras

    def seed(self, seeds: Sequence[int]) -> None:
        self.draw_from(PerEnvRng(seeds))
        self._random.seed(seeds)

    def draw_from(self, rng: PerEnvRng | None) -> None:
        """Draw from these streams from now on; None: from torch's own generators."""
        self._rng = rng
        if self.state is not None:
            self.state.draw_from(rng, contextlib.nullcontext if rng is None else rng.drawing)

    @contextlib.contextmanager
    def exploring(self) -> Iterator[None]:
        """Compute no gradients, and set the exploration type of TensorDict policies."""
        without_gradients = torch.no_grad() if self._needs_autograd else torch.inference_mode()
        with without_gradients, set_interaction_type(self._exploration.interaction):
            yield

    def __call__(self, rows: Sequence[int] | None = None) -> PolicyOutput:
        if self._inputs.users() != self._users:
            self._bind(copies=True)  # it keeps the observation, or what it returned is a view of it
        for update in self._inputs.updates:
            update()
        try:
            if self._rng is None:
                actions, extras, state = self._choose(rows)
            else:
                self._rng.next_frame(rows)
                with self._rng.drawing():
                    actions, extras, state = self._choose(rows)
        except PolicyError:
            raise
        except users_errors() as error:
            raise raised(error, self._inputs.tensors.items()) from error
        if self.state is not None:
            self.state.advance(state, rows)
        return actions, extras

    def _choose(self, rows: Sequence[int] | None) -> Read:
        actions, extras, state = self._outputs.read(self._call())
        for noise in self.noises:
            actions = noise.change(actions, rows)
        return actions, extras, state

    def _first(self, call: Callable[[], Any]) -> Any:
        """Do the first call; one that computes gradients is not done in inference mode."""
        self._call, self._has_run = call, True
        try:
            return call()
        except RuntimeError:
            if not torch.is_inference_mode_enabled():
                raise
            self._needs_autograd = True
            with torch.inference_mode(mode=False), torch.no_grad():
                return call()
