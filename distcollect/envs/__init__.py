"""Envs of every kind behind one stepping interface."""
