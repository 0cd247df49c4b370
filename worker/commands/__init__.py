"""Runs that are commands: checkout, process, clean-up."""
