"""The data contract: how frames lie in memory, on the wire, and in a batch."""
