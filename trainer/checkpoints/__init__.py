"""Checkpoints: saving, resuming, rollback and weights files."""
