"""Runs of a server on their way into what other loggers read."""
