"""Workers that a Ray cluster starts."""
