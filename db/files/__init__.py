"""Stored files: checkpoints, artifacts, uploads, retention and backup."""
