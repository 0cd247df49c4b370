"""Sweeps and their trials."""
