"""Tells an env that fails from a policy whose action no env can take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.spaces import Box

from distcollect.errors import EnvError, PolicyError
from distcollect.rollout.spaces import Arrays, leaf_spaces, limits_of

if TYPE_CHECKING:
    from distcollect.envs.base import EnvBatch, Fault


def check_actions(
    envs: EnvBatch,
    actions: Iterable[np.ndarray],
    are_real: np.ndarray | None = None,
    observation: Arrays | None = None,
) -> None:
    """Refuse actions that no env can take. The bounds of a Box, and absent agents, don't count.

    Args:
        envs: the envs.
        actions: ``[n, *shape]`` or ``[n, T, *shape]`` for each leaf.
        are_real: bool ``[n]`` or ``[n, T]``: the actions to check; None: all.
        observation: for which the actions were chosen; None: that of now.

    Raises:
        PolicyError: one is outside of a space of whole numbers, or NaN or infinite.
    """
    observation = envs.obs if observation is None else observation
    parts = (part for _, part in leaf_spaces(envs.action_space))
    for part, array, leaf in zip(parts, actions, envs.action_leaves, strict=True):
        limits = limits_of(part)
        if limits is None:
            is_wrong = ~np.isfinite(array)
            wanted = "finite numbers: look for NaN in its input, and in its weights"
        else:
            low, high = limits
            is_wrong = (array < low) | (array > high)
            wanted = f"numbers from {low} to {high}"
        mask = observation.get((leaf.key[0], "mask"))
        if mask is not None and envs.outcome_leaves:  # a group of PettingZooEnv
            is_wrong = (is_wrong.T & mask.T).T
        if not is_wrong.any():
            continue
        num_lead = array.ndim - len(leaf.shape)
        is_wrong = is_wrong.reshape(*array.shape[:num_lead], -1).any(-1)
        if are_real is not None:
            is_wrong &= are_real
        for at in np.argwhere(is_wrong).tolist():
            raise PolicyError(
                f"the policy returned the action {array[tuple(at)].tolist()} for "
                f"{envs.name(at[0])}, whose action space is {envs.action_space}: it must return "
                f"{wanted}"
            )


def blamed(envs: EnvBatch, faults: Sequence[Fault], action: Arrays) -> list[Fault]:
    """Return the faults of a step; one whose action was outside of a Box says so.

    Raises:
        PolicyError: an env raised for an action that it can't take.
    """
    raised = np.zeros(envs.num_envs, bool)
    raised[[row for fault in faults if not fault.stepped for row in fault.rows]] = True
    try:
        check_actions(envs, (action[leaf.key] for leaf in envs.action_leaves), raised)
    except PolicyError as error:
        raise error from faults[0].error
    return [fault._replace(error=_advised(envs, fault, action)) for fault in faults]


def _advised(envs: EnvBatch, fault: Fault, action: Arrays) -> EnvError:
    rows, error, _ = fault
    for leaf, (_, part) in zip(envs.action_leaves, leaf_spaces(envs.action_space), strict=True):
        given = action[leaf.key][list(rows)]
        if isinstance(part, Box) and ((given < part.low) | (given > part.high)).any():
            advised = EnvError(
                f"{error.message} (its action was outside of {part}; clip_actions=True clips "
                "actions)"
            )
            advised.__cause__ = error.__cause__
            return advised
    return error
