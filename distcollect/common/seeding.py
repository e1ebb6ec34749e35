"""All random numbers of a run that come from one seed."""

from __future__ import annotations

import enum
import operator

import numpy as np

from distcollect.errors import ArgumentError, ArgumentTypeError


class Stream(enum.IntEnum):
    """What seeds are drawn for, each independent of the others."""

    ENVS = 0
    POLICY = 1
    NEXT_COLLECTOR = 2
    RESUMED = 3
    EVALUATION = 4
    REBUILT = 5
    REPLACED = 16  # and two for each process that takes another's place, from here on


def env_seed(seed: int, index: int, stream: int = Stream.ENVS) -> int:
    """The seed of env ``index``: independent of how the envs are spread over workers.

    Below 2**31: envs written in C take it as an int.

    Raises:
        ArgumentError, ArgumentTypeError: ``seed`` is no whole number, 0 or more.
    """
    try:
        wanted = operator.index(seed)
    except TypeError:
        raise ArgumentTypeError(f"seed={seed!r}: must be a whole number, 0 or more") from None
    if wanted < 0:
        raise ArgumentError(f"seed={seed!r}: must be a whole number, 0 or more")
    return int(np.random.SeedSequence([seed, int(stream), index]).generate_state(1)[0]) >> 1


def policy_seed(seed: int, index: int, stream: int = Stream.POLICY) -> int:
    """The seed of what a policy draws for env ``index``, below 2**64: no two envs' are the same."""
    entropy = np.random.SeedSequence([seed, int(stream), index])
    return int(entropy.generate_state(1, np.uint64)[0])


def process_seeds(
    seed: int, envs: range, incarnation: int, *, static: bool
) -> tuple[list[int], list[int]]:
    """What a worker's process is seeded with: its envs', and its policy's for each of them.

    Args:
        seed: of all.
        envs: the numbers of its envs among those of the run.
        incarnation: which process in its slot; it doesn't repeat what the one before did.
        static: all envs get the same.
    """
    stream = Stream.REPLACED + 2 * incarnation if incarnation else 0
    env_seeds = [env_seed(seed, 0 if static else env, stream=stream) for env in envs]
    return env_seeds, [policy_seed(seed, env, stream=stream + 1) for env in envs]


def shares(total: int, num: int) -> list[int]:
    """``total`` as ``num`` whole numbers that differ by one at most."""
    each, rest = divmod(total, num)
    return [each + (index < rest) for index in range(num)]
