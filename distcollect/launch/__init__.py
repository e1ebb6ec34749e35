"""Launches: torchrun, SLURM, plain Python; and the processes of this host."""
