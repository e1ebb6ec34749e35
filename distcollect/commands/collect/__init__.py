"""``distcollect collect``: collects frames of an env and writes them to disk."""
