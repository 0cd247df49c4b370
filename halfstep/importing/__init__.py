"""Runs that other loggers recorded, on their way into folders as `halfstep.watch` writes them."""
