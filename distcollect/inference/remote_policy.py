"""A policy that an inference server computes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from distcollect.errors import PolicyError
from distcollect.inference.link import Connection, Link, ServerGone
from distcollect.inference.protocol import STREAM, Answer, Caller, Kind
from distcollect.policy.base import Exploration, Policy, PolicyOutput, Renewed
from distcollect.policy.calling import Tensors
from distcollect.policy.noise import Actions, noises_of
from distcollect.policy.per_env_rng import PerEnvRng
from distcollect.policy.random import RandomPolicy
from distcollect.policy.recurrent import PolicyState
from distcollect.rollout.spaces import Arrays, Leaf, leaves_of


def served(*_: Any, **__: Any) -> Any:
    """Stand for the policy in the plan of a worker that does not have it."""
    raise PolicyError("this worker has no policy: the inference server of its host has it")


class RemotePolicy(Policy):
    """Asks the server for actions. What a row carries from frame to frame stays here.

    Attributes:
        link: the way to the server.
        version: policy_version that chose what was taken last; an answer that was computed before
            another one may be taken after it.
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
        for_evaluation: bool = False,
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
            for_evaluation: the policy's buffers stay as they are.

        Raises:
            DeadlineError: the server did not answer in time.
            PolicyError: the policy can't be called with these observations.
        """
        self.link = link
        self.version = 0
        self.on_answer: Callable[..., object] = lambda **_: None
        self._observation = observation
        self._num_rows = len(next(iter(observation.values())))
        self._caller = Caller(
            link.worker_id,
            observation_space,
            action_space,
            tuple(leaves),
            self._num_rows,
            exploration.value,
            for_evaluation,
        )
        self._random = RandomPolicy(action_space, self._num_rows)  # of noise
        self.noises = noises_of(
            policy, action_space, self._num_rows, lambda rows: self._random(rows)[0]
        )
        if exploration is not Exploration.RANDOM:
            self.noises = ()
        self._rng: PerEnvRng | None = None
        self._connection: Connection | None = None
        self._extras: tuple[Leaf, ...] | None = None  # before the first answer
        self._num_actions = len(leaves_of(action_space, "action"))
        # The oldest policy_version that an episode began with whose first action is to be chosen.
        self._began_with: float = math.inf
        self._asked: dict[range, int] = {}  # to the request's number; 0: it is to be sent again
        connection = self._connected(self._deadline())
        if connection.served.state is not None:
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
        if self.state is not None:
            self.state.draw_from(self._rng)
        self._random.seed(seeds)

    def __call__(self, rows: Sequence[int] | None = None) -> PolicyOutput:
        everyone = range(self._num_rows)
        self.forget_requests()
        self.ask(everyone)
        arrays = self.take(everyone, rows, may_wake=rows is None and not self._is_tried_out)
        num_actions, num_outputs = self._num_actions, self._num_actions + len(self.extras)
        actions: Actions = arrays[:num_actions]
        if self.noises:
            with self._drawing():
                for noise in self.noises:
                    actions = noise.change(actions, rows)
        if self.state is not None:
            self.state.advance(arrays[num_outputs:], rows)
            if rows is None:
                self._began_with = math.inf
        return actions, arrays[num_actions:num_outputs]

    @property
    def _is_tried_out(self) -> bool:
        """True in the first call, which is no part of a rollout."""
        return self._extras is None

    @property
    def can_halve(self) -> bool:
        """True if rows can be asked for apart: nothing here has to be done for all at once."""
        return self._num_rows > 1 and self.state is None and not self.noises

    def ask(self, rows: range) -> None:
        """Ask for the actions of these rows, whose observations are there; see :meth:`take`."""
        self._asked[rows] = 0
        with contextlib.suppress(ServerGone):  # then take() asks again
            self._send(rows, self._connected(self._deadline()))

    def is_asked(self, rows: range) -> bool:
        """Return True if exactly these rows were asked for, and not taken."""
        return rows in self._asked

    def forget_requests(self) -> None:
        """What was asked for is not taken."""
        self._asked.clear()

    def take(
        self, rows: range, which: Sequence[int] | None = None, *, may_wake: bool
    ) -> list[np.ndarray]:
        """Wait for what was asked for: action, extras and next state, ``[k, *shape]`` of k rows.

        Args:
            rows: as they were asked for.
            which: of these, those whose frames go on; None: all.
            may_wake: raise Woken if something else is to be done first.

        Raises:
            DeadlineError: no server answered in time.
            PolicyError: the policy raised.
            Woken: see above, and at the end.
            Renewed: episodes begin whose state is learned, and newer weights chose the actions.
        """

        def choose(connection: Connection) -> int:
            for each, number in list(self._asked.items()):
                if not number:
                    self._send(each, connection)
            return self._asked[rows]

        connection, answer = self._answered(choose, may_wake=may_wake)
        del self._asked[rows]
        self.link.expect(answer.version)
        if self.state is not None and self._began_with < answer.version and not self._is_tried_out:
            self._began_with = math.inf
            self.state.renew()
            raise Renewed
        self.version = answer.version
        self.on_answer(
            queue_ns=answer.queue_ns,
            forward_ns=answer.forward_ns,
            num_rows=answer.num_rows,
            num_computed=answer.num_computed,
        )
        assert connection.outputs is not None
        self._extras = connection.extras
        if self._rng is not None:
            whole = len(rows) == self._num_rows
            self._rng.next_frame(which if whole else rows)
            self._rng.num_drawn = answer.drawn
        part = slice(rows.start, rows.stop)
        # Copied, as an env may keep its action.
        return [array[part].copy() for array in connection.outputs.values()]

    def _send(self, rows: range, connection: Connection) -> None:
        part, drawn = slice(rows.start, rows.stop), -1
        state = {} if self.state is None else self.state.arrays
        for key, array in (*self._observation.items(), *state.items()):
            connection.inputs[key][part] = array[part]
        if self._rng is not None:
            connection.inputs[STREAM.key][part] = self._rng.states[part, 0]
            drawn = 0
        self._asked[rows] = connection.send(Kind.CHOOSE, rows.start, len(rows), drawn)

    def _answered(
        self, ask: Callable[[Connection], int], *, may_wake: bool = False
    ) -> tuple[Connection, Answer]:
        """Wait for the answer to a request, of this server or of the one that takes its place.

        ``ask`` sends the request if that is still to be done, and returns its number.
        """
        deadline = self._deadline()
        while True:
            connection = self._connected(deadline)
            try:
                number, others = ask(connection), self._asked.values()
                return connection, connection.receive(
                    number, deadline, others=others, may_wake=may_wake
                )
            except ServerGone:  # what was asked of it is asked of the next one
                connection.close()
                self._connection = None
                self._asked = dict.fromkeys(self._asked, 0)

    def _drawing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._rng is None else self._rng.drawing()

    def _initial_state(self) -> Tensors:
        """The state at the start of episodes, ``[n, *shape]`` for each entry."""

        def begin(connection: Connection) -> int:
            drawn = -1
            if self._rng is not None:
                connection.inputs[STREAM.key][:] = self._rng.states[:, 0]
                drawn = self._rng.num_drawn
            return connection.send(Kind.BEGIN, 0, self._num_rows, drawn)

        connection, answer = self._answered(begin)
        if self._rng is not None:
            self._rng.num_drawn = answer.drawn
        self._began_with = min(self._began_with, answer.version)
        state = connection.served.state or ()
        return {leaf.key: torch.from_numpy(connection.inputs[leaf.key].copy()) for leaf in state}

    def _connected(self, deadline: float) -> Connection:
        """The connection, or one to the server that took the place of another."""
        if self._connection is None:
            self._connection = self.link.connect(self._caller, deadline)
        return self._connection

    def _deadline(self) -> float:
        return time.monotonic() + self.link.serving.timeout_s
