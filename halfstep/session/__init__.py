"""Watched runs in their process: arguments, logging, exit hooks, notebooks."""
