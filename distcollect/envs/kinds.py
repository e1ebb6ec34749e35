"""The kinds of envs: how what a library calls an env becomes a batch of envs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import VectorEnv

from distcollect.envs.base import Envs, InfoKeys, Remaker
from distcollect.envs.single import SingleEnvBatch
from distcollect.envs.vector import VectorBatch
from distcollect.integrations import load_for


class EnvKind:
    """Gymnasium's envs. Integrations derive the kinds of other libraries from it.

    Attributes:
        library: the library's name.
        can_be_copied: an env object that the user passes is copied to every worker.
    """

    library = "Gymnasium"
    can_be_copied = False

    def prepared(self, env: Any, device: torch.device | None) -> Any:
        """Return ``env`` as it is used: on ``device``, if it computes on one, or wrapped."""
        return env

    def num_rows(self, env: Any) -> int | None:
        """Return how many rows an env steps at once; None for a single env."""
        return env.num_envs if isinstance(env, VectorEnv) else None

    def batch(self, envs: list[Any], info_keys: InfoKeys | None, makers: Sequence[Remaker]) -> Envs:
        """Return the batch of single envs, or of one env of several rows.

        Args:
            envs: the envs, as :meth:`prepared` gave them.
            info_keys: see :func:`~distcollect.envs.make.make_envs`.
            makers: for each env what makes it again.
        """
        if isinstance(envs[0], VectorEnv):
            return VectorBatch(envs[0], info_keys, makers[0])
        return SingleEnvBatch(envs, info_keys, makers)


_GYMNASIUM = EnvKind()


def kind_of(env: object) -> EnvKind | None:
    """Return the kind of an env; None: ``env`` is no env of a supported kind."""
    kind: EnvKind | None = load_for(env)
    return _GYMNASIUM if kind is None and isinstance(env, gym.Env | VectorEnv) else kind


def is_env(value: object) -> bool:
    """Return True if ``value`` is an env of a supported kind."""
    return kind_of(value) is not None
