"""``distcollect doctor``: what is wrong with these hosts and their network, and what to do."""
