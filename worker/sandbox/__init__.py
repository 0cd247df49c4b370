"""Isolation of a run: Landlock, users, cgroups, environment."""
