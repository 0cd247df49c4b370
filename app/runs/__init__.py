"""Runs: the list with its filter, the page of a run and its controls."""
