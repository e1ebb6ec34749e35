"""Inference servers: one process computes the actions of all workers on its host."""
