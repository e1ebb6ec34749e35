"""A policy that an inference server computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch

from distcollect.errors import PolicyError
from distcollect.inference.link import Connection, Link, ServerGone
from distcollect.inference.protocol import STREAM, Answer, Caller, Kind
from distcollect.policy.base import Exploration, Policy, PolicyOutput
from distcollect.policy.calling import Tensors
from distcollect.policy.noise import Actions, noises_of
from distcollect.policy.per_env_rng import PerEnvRng
from distcollect.policy.random import RandomPolicy
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Arrays, Leaf


def served(*_: Any, **__: Any) -> Any:
    """Stand for the policy in the plan of a worker that does not have it."""
    raise PolicyError("this worker has no policy: the inference server of its host has it")


class RemotePolicy(Policy):
    """Asks the server for actions. What a row carries from frame to frame stays here.

    Attributes:
        link: the way to the server.
        on_answer: told of each answer to a request for actions, see
            :class:`~distcollect.rollout.header.WorkReport`.
    """

    def __init__(
        self,
        link: Link,
        policy: Callable[..., Any],
        observation: Arrays,
        leaves: Sequence[Leaf],
        observation_space: gym.Space[Any],
        *,
        action_space: gym.Space[Any],
        exploration: Exploration,
    ) -> None:
        """Meet the server.

        Args:
            link: the way to it.
            policy: :func:`served`, perhaps with noise around it.
            observation: ``{key: [n, *shape]}``, the arrays that the envs rewrite at every step.
            leaves: of the observation.
            observation_space: of a single env.
            action_space: of a single env.
            exploration: how to choose actions where the policy has, or returns, a distribution.

        Raises:
            DeadlineError: the server did not answer in time.
            PolicyError: the policy can't be called with these observations.
        """
        self.link = link
        self.on_answer: Callable[..., object] = lambda **_: None
        self._observation = observation
        self._num_rows = len(next(iter(observation.values())))
        self._caller = Caller(
            observation_space, action_space, tuple(leaves), self._num_rows, exploration.value
        )
        self._random = RandomPolicy(action_space, self._num_rows)  # of noise
        self.noises = noises_of(
            policy, action_space, self._num_rows, lambda rows: self._random(rows)[0]
        )
        if exploration is not Exploration.RANDOM:
            self.noises = ()
        self._rng: PerEnvRng | None = None
        self._connection: Connection | None = None
        self._extras: tuple[Leaf, ...] | None = None
        connection = self._connected(self._deadline())
        if (state := connection.served.state) is not None:
            self._at_begin: Arrays = {leaf.key: leaf.zeros(self._num_rows) for leaf in state}
            self.state = PolicyState(
                self._num_rows,
                self._initial_state,
                has_is_init=connection.served.has_is_init,
                at_root=connection.served.at_root,
            )

    @property
    def extras(self) -> tuple[Leaf, ...]:
        return self._extras or ()

    def seed(self, seeds: Sequence[int]) -> None:
        self._rng = PerEnvRng(seeds)
        self._random.seed(seeds)

    def __call__(self, rows: Sequence[int] | None = None) -> PolicyOutput:
        answer = self._ask(Kind.CHOOSE, may_wake=rows is None)
        connection = self._connection
        assert connection is not None
        assert connection.outputs is not None
        self.link.expect(answer.version)
        self.on_answer(
            queue_ns=answer.queue_ns,
            forward_ns=answer.forward_ns,
            num_rows=answer.num_rows,
            num_computed=answer.num_computed,
        )
        if self._extras is None:
            self._extras = connection.extras
        # Copied, as an env may keep its action.
        arrays = [array.copy() for array in connection.outputs.values()]
        num_actions = len(arrays) - len(self._extras) - len(connection.served.state or ())
        num_outputs = num_actions + len(self._extras)
        actions: Actions = arrays[:num_actions]
        if self._rng is not None:
            self._rng.next_frame(rows)
            self._rng.num_drawn = answer.drawn
        if self.noises:
            with self._drawing():
                for noise in self.noises:
                    actions = noise.change(actions, rows)
        if self.state is not None:
            self.state.advance(arrays[num_outputs:], rows)
        return actions, arrays[num_actions:num_outputs]

    def _drawing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._rng is None else self._rng.drawing()

    def _initial_state(self) -> Tensors:
        """The state at the start of episodes, ``[n, *shape]`` for each entry."""
        answer = self._ask(Kind.BEGIN, may_wake=False)
        if self._rng is not None:
            self._rng.num_drawn = answer.drawn
        return {key: torch.from_numpy(array) for key, array in self._at_begin.items()}

    def _ask(self, kind: Kind, *, may_wake: bool) -> Answer:
        """Ask for all rows, again if the server has ended; the results lie in its memory.

        Raises:
            DeadlineError: no server answered in time.
            PolicyError: the policy raised.
            Woken: something else is to be done first; only if it ``may_wake``, or at the end.
        """
        deadline = self._deadline()
        while True:
            connection = self._connected(deadline)
            drawn = -1
            try:
                for key, array in self._observation.items():
                    connection.inputs[key][:] = array
                if self.state is not None and kind is Kind.CHOOSE:
                    for key, array in self.state.arrays.items():
                        connection.inputs[key][:] = array
                if self._rng is not None:
                    connection.inputs[STREAM.key][:] = self._rng.states[:, 0]
                    drawn = self._rng.num_drawn
                number = connection.send(kind, 0, self._num_rows, drawn)
                answer = connection.receive(number, deadline, may_wake=may_wake)
            except ServerGone:
                connection.close()
                self._connection = None
                continue
            if kind is Kind.BEGIN:
                for key, array in self._at_begin.items():
                    array[:] = connection.inputs[key]
            return answer

    def _connected(self, deadline: float) -> Connection:
        """The connection, or one to the server that took the place of another."""
        while self._connection is None:
            with contextlib.suppress(ServerGone):
                self._connection = Connection(self.link, self._caller, deadline)
        return self._connection

    def _deadline(self) -> float:
        return time.monotonic() + self.link.serving.timeout_s
