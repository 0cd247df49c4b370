"""Submission: forms of new runs and commands, presets, estimates, recipes."""
