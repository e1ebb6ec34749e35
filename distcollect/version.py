"""The version of the package, where building it can read it without importing torch."""

__version__ = "0.1.0"

# Of packages whose private parts are used: what works where another version lacks them.
TESTED = {"envpool": "1.2.5", "submitit": "1.5.4", "torch": "2.13.0"}
