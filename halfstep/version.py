"""Version of both wheels."""

__version__ = "0.1.0"
