"""Recorded data of a run: series, metrics, diagnosis, environment, system samples."""
