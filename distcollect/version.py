"""The version of the package, where building it can read it without importing torch."""

__version__ = "0.1.0"
