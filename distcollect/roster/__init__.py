"""Which workers are in the run: starts, watches and replaces them."""
