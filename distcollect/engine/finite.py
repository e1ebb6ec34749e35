"""Refuses rollouts whose observations or rewards hold NaN or infinity.

Once per rollout, as a check of each step would take several times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from distcollect.envs.base import EnvBatch
from distcollect.errors import EnvError
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Key, Leaf


def check_finite(slab: Slab, envs: EnvBatch, observed: Sequence[Leaf]) -> None:
    """Raise EnvError unless all rewards and observations of a rollout are finite.

    Args:
        slab: the rollout.
        envs: its envs.
        observed: leaves of the observation; entries of info may be NaN.
    """
    floats = [leaf.key for leaf in observed if leaf.dtype.is_floating_point]
    for row, what in itertools.chain(_rewards(slab), _observations(slab, floats)):
        raise EnvError(
            f"{envs.name(row)}: {what}: find out why, scale it in a wrapper if it is too "
            "large for its dtype, or let such values pass with check_nan=False"
        )


def _observations(slab: Slab, keys: Sequence[Key]) -> Iterator[tuple[int, str]]:
    if not keys:
        return
    rows, _, final = slab.finals()
    for key in keys:
        name = repr(".".join(key))
        for array in (slab.root[key], slab.tail[key]):
            for row, value in _not_finite(array):
                yield row, f"{name} has {value:g} in it"
        for index, value in _not_finite(final[key]):
            yield int(rows[index]), f"{name} has {value:g} in it"


def _rewards(slab: Slab) -> Iterator[tuple[int, str]]:
    for key, array in {("reward",): slab.reward, **slab.outcomes}.items():  # also those of agents
        for row, value in _not_finite(array):
            yield row, f"the {'.'.join(key)}, as float32, is {value:g}"


def _not_finite(array: np.ndarray) -> list[tuple[int, float]]:
    """Return (row, value) of numbers that are not finite."""
    is_finite = np.isfinite(array)
    if is_finite.all():
        return []
    return [(at[0], float(array[tuple(at)])) for at in np.argwhere(~is_finite).tolist()]
