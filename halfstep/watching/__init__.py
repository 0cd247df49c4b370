"""Monitoring of a training loop: hooks, steps, gradients and their way to the host."""
