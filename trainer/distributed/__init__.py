"""Ranks, process groups and sharded weights."""
