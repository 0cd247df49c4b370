"""Whole jobs of operators, by the documented commands on a live installation."""
