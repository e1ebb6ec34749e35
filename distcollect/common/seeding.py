"""Derives the seeds of envs and policies from the one seed of a run."""

from __future__ import annotations

import enum
import functools
import operator

import numpy as np

from distcollect.errors import ArgumentError, ArgumentTypeError

# The envs of trainer t are counted from t times this.
ENVS_PER_TRAINER = 1 << 24


class Stream(enum.IntEnum):
    """Purposes of seeds; seeds of different streams are independent."""

    ENVS = 0
    POLICY = 1
    NEXT_COLLECTOR = 2
    RESUMED = 3
    EVALUATION = 4
    REBUILT = 5
    BACKGROUND = 6
    # A process that replaces another one uses two streams of its own. They begin here:
    # REPLACED + 2 * incarnation for its envs, and the next one for its policy.
    REPLACED = 16


def checked_seed(seed: int) -> int:
    """Return the seed that a user gave, as an int.

    Raises:
        ArgumentError: it is negative.
        ArgumentTypeError: it is not a whole number.
    """
    try:
        wanted = int(operator.index(seed))
    except TypeError:
        raise ArgumentTypeError(f"seed={seed!r}: must be a whole number, 0 or more") from None
    if wanted < 0:
        raise ArgumentError(f"seed={seed!r}: must be a whole number, 0 or more")
    return wanted


def env_seed(seed: int, index: int, stream: int = Stream.ENVS) -> int:
    """Return the seed of env ``index`` of the run, whichever worker steps the env.

    It is below 2**31, as envs written in C take it as an int.
    """
    entropy = np.random.SeedSequence([seed, int(stream), index])
    return int(entropy.generate_state(1)[0]) >> 1


def policy_seed(seed: int, index: int, stream: int = Stream.POLICY) -> int:
    """Return the seed of what a policy draws for env ``index``: below 2**64, one for each env."""
    entropy = np.random.SeedSequence([seed, int(stream), index])
    return int(entropy.generate_state(1, np.uint64)[0])


def process_seeds(
    seed: int, envs: range, incarnation: int, *, static: bool, as_torchrl: bool = False
) -> tuple[list[int], list[int]]:
    """Return the seeds of a process: one for each env, and one for the policy in each env.

    Args:
        seed: the seed of the run.
        envs: the indices of the process's envs among all envs of the run.
        incarnation: number of the process in the worker's slot, counted from 0; each gets other
            seeds than the one before.
        static: all envs get the same env seed.
        as_torchrl: env i gets the i-th seed of TorchRL's chain; not one of a replacement or of a
            second trainer, which TorchRL does not have.
    """
    stream = Stream.REPLACED + 2 * incarnation if incarnation else 0
    indices = [0 if static else env for env in envs]
    if as_torchrl and not incarnation and envs.start < ENVS_PER_TRAINER:
        env_seeds = [next_seed(seed, index) for index in indices]
    else:
        env_seeds = [env_seed(seed, index, stream=stream) for index in indices]
    return env_seeds, [policy_seed(seed, env, stream=stream + 1) for env in envs]


def next_seed(seed: int, count: int) -> int:
    """Return the seed that follows ``count`` seeds in TorchRL's chain; ``seed`` is its first."""
    for _ in range(count):
        seed = _following(seed)
    return seed


@functools.lru_cache(maxsize=2**16)  # the chain is walked from its start for each env
def _following(seed: int) -> int:
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)


def shares(total: int, num: int) -> list[int]:
    """``total`` split into ``num`` whole numbers that differ by at most one."""
    each, rest = divmod(total, num)
    return [each + (index < rest) for index in range(num)]
