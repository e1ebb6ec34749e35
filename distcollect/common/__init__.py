"""Tools that every other package may use: threads, shared memory, seeds, counters, checks."""
