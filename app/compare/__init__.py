"""Comparison, shared links and notes."""
