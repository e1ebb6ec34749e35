"""``distcollect collect``: frames of an env to disk."""
