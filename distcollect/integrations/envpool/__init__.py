"""Envs of EnvPool, in its sync and its async mode."""
