"""HybridSpec: choose how many draft tokens to verify, per request and per round.

Importing this package imports neither torch nor any engine; submodules do.
"""

__version__ = "0.1.0"
