"""The kinds of envs: how what a library calls an env becomes a batch of envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv

from distcollect.envs.base import Env, Envs, InfoKeys, name_of
from distcollect.envs.single import SingleEnvBatch
from distcollect.envs.vector import VectorBatch
from distcollect.errors import SpaceError
from distcollect.integrations import load_for
from distcollect.rollout.spaces import leaves_of


class EnvKind:
    """Gymnasium's envs. Integrations derive the kinds of other libraries from it.

    Attributes:
        library: the library's name.
        can_be_copied: an env object that the user passes is copied to every worker.
    """

    library = "Gymnasium"
    can_be_copied = False

    def prepared(self, env: Any, device: torch.device | None) -> Any:
        """``env`` as it is used: on ``device``, if it computes on one, or wrapped."""
        return env

    def num_rows(self, env: Any) -> int | None:
        """How many rows an env steps at once; None for a single env."""
        return env.num_envs if isinstance(env, VectorEnv) else None

    def batch(
        self,
        envs: list[Any],
        info_keys: InfoKeys | None,
        makers: list[Callable[[], Any] | None],
    ) -> Envs:
        """The batch of single envs, or of one env of several rows.

        Args:
            envs: the envs, as :meth:`prepared` gave them.
            info_keys: see :func:`~distcollect.envs.make.make_envs`.
            makers: for each env what makes it again; None: nothing does.
        """
        if isinstance(envs[0], VectorEnv):
            return VectorBatch(envs[0], info_keys, makers[0])
        _check_alike(envs)
        return SingleEnvBatch(envs, info_keys, makers)


_GYMNASIUM = EnvKind()


def kind_of(env: object) -> EnvKind | None:
    """The kind of an env; None: ``env`` is no env of a supported kind."""
    kind: EnvKind | None = load_for(env)
    return _GYMNASIUM if kind is None and isinstance(env, gym.Env | VectorEnv) else kind


def is_env(value: object) -> bool:
    """Return True if ``value`` is an env of a supported kind."""
    return kind_of(value) is not None


def _check_alike(envs: Sequence[Env]) -> None:
    """Raise SpaceError unless all envs have the same spaces."""
    first = envs[0]
    for row, env in enumerate(envs):
        for role in ("observation", "action"):
            mine, theirs = getattr(env, f"{role}_space"), getattr(first, f"{role}_space")
            # The bounds of observations may differ; action spaces must be equal.
            same = leaves_of(mine, role) == leaves_of(theirs, role)
            if not same or (role == "action" and mine != theirs):
                raise SpaceError(
                    f"env {row} ({name_of(env)}) has another {role} space than env 0 "
                    f"({name_of(first)}): {mine} instead of {theirs}; all envs of a worker must "
                    "have the same spaces"
                )
