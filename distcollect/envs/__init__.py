"""Envs of every kind behind one stepping interface."""

from distcollect.envs.base import EnvBatch, Fault, Faulted, Step
from distcollect.envs.make import EnvContext, check_env_id, is_env, make_envs
from distcollect.envs.pettingzoo import PettingZooEnv

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
