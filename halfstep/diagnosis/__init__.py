"""Causes of what goes wrong in a training loop, stated from evidence. Free of torch."""
