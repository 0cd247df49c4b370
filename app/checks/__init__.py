"""Uploaded reports of `halfstep check`."""
