"""Measures what an inference server would gain, in a worker that is started for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from distcollect.inference.protocol import Serving
from distcollect.policy.user import UserPolicy
from distcollect.rollout.spaces import Arrays

# For each of the two numbers of envs; slow passes may take longer.
_LIMIT_S = 0.3
_FEWEST = 3


def forward_s(
    policy_for: Callable[[Arrays], UserPolicy],
    observation: Arrays,
    serving: Serving,
    cores: tuple[int, ...],
) -> tuple[float, float]:
    """How long a forward pass takes: of a worker's envs in a worker, of all envs in a server.

    Args:
        policy_for: binds the policy to arrays of observations.
        observation: ``{key: [n, *shape]}``, of a worker's envs.
        serving: what the server would be told.
        cores: those that workers may keep busy on this host; empty if unknown.
    """
    alone_s = _shortest_s(policy_for(observation))
    serving.take_cores(cores)
    count = serving.num_workers  # in a pass
    if serving.batch_size is not None:
        count = max(1, min(count, serving.batch_size // len(next(iter(observation.values())))))
    several = {key: np.concatenate([array] * count) for key, array in observation.items()}
    return alone_s, math.ceil(serving.num_workers / count) * _shortest_s(policy_for(several))


def _shortest_s(policy: UserPolicy) -> float:
    shortest, count, until = math.inf, 0, time.monotonic() + _LIMIT_S
    with policy.exploring():
        while count < _FEWEST or time.monotonic() < until:
            begin = time.perf_counter()
            policy()
            shortest = min(shortest, time.perf_counter() - begin)
            count += 1
    return shortest
