"""Counters, traces, and how they are shown: terminal, file, Prometheus, TensorBoard."""
