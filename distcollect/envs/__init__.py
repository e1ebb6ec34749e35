"""Envs of every kind behind one stepping interface."""

from .base import EnvBatch, Fault, Faulted, Step
from .make import EnvContext, check_env_id, is_env, make_envs
from .pettingzoo import PettingZooEnv

__all__ = [
    "EnvBatch",
    "EnvContext",
    "Fault",
    "Faulted",
    "PettingZooEnv",
    "Step",
    "check_env_id",
    "is_env",
    "make_envs",
]
