"""Injures real workers at random, and checks every frame: ``tests/chaos/run.py``."""
