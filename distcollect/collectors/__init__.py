"""The collectors: what a user iterates over."""
