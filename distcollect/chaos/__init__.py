"""Real workers, injured at random, and a check of every frame that arrives: ``launch/chaos.py``."""
