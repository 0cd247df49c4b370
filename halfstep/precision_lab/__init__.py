"""Precision lab: where a training in low precision loses accuracy, module by module."""
