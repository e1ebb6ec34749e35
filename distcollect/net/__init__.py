"""Sockets: interfaces, and the control connections between a trainer and its workers."""
