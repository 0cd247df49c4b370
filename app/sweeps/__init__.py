"""Sweeps: search spaces, suggestions, early stopping, pages and API."""
