"""Runs: submission, lists, filters, groups, metadata and the trash."""
