"""Policies of every kind behind one call, their weights, and their randomness."""
