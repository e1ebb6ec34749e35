"""Counters and traces, and where they are shown: terminal, files, Prometheus, TensorBoard."""
