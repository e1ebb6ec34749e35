"""Injects random faults into real workers, and checks every frame: ``tests/chaos/run.py``."""
