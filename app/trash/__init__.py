"""Trash, retention and storage."""
