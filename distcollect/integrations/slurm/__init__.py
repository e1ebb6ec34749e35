"""Runs on SLURM clusters, by submitit."""
