"""Makes the envs of EnvPool take a time for each step that is random, and uses no CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class _Due(NamedTuple):
    """A step or a reset that has begun.

    Attributes:
        at: when it is over, in seconds.
        row: of the env.
        inputs: the arguments of the step, each of one row; None: a reset.
    """

    at: float
    row: int
    inputs: list[np.ndarray] | None


class UnevenPool:
    """Takes the place of an EnvPool env's native functions.

    The envs themselves must be fast: they make their step when it is over.
    """

    def __init__(
        self,
        pool: Any,
        duration: Callable[[int], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Replace the functions of ``pool``, also of one in EnvPool's asynchronous mode.

        Args:
            pool: the env.
            duration: gives the seconds that the next step or reset of a row takes.
            clock: in seconds.
            sleep: waits for so many seconds.
        """
        self._duration, self._clock, self._sleep = duration, clock, sleep
        self._ids_at = list(pool.spec.action_array_spec).index("env_id")
        self._num_ready = int(pool.config["batch_size"])
        self._due: list[_Due] = []
        self._send, self._recv, self._reset = pool._send, pool._recv, pool._reset
        pool._send, pool._recv, pool._reset = self.send, self.recv, self.reset

    def send(self, inputs: list[np.ndarray]) -> None:
        """Begin a step of some rows."""
        for index, row in enumerate(inputs[self._ids_at].tolist()):
            self._begin(row, [array[index : index + 1] for array in inputs])

    def reset(self, rows: np.ndarray) -> None:
        """Begin a reset of some rows."""
        for row in rows.tolist():
            self._begin(row, None)

    def _begin(self, row: int, inputs: list[np.ndarray] | None) -> None:
        self._due.append(_Due(self._clock() + self._duration(row), row, inputs))

    def recv(self) -> Any:
        """Wait for the results that come first."""
        self._due.sort(key=lambda due: due.at)
        over, self._due = self._due[: self._num_ready], self._due[self._num_ready :]
        if (left := over[-1].at - self._clock()) > 0:
            self._sleep(left)
        steps = [due.inputs for due in over if due.inputs is not None]
        if steps:
            self._send([np.concatenate(arrays) for arrays in zip(*steps, strict=True)])
        resets = [due.row for due in over if due.inputs is None]
        if resets:
            self._reset(np.array(resets, np.int32))
        return self._recv()
