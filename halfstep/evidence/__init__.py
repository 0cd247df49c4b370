"""Evidence in a watched loop that explains its skips, its scale and its losses.

Each module here observes one kind of evidence and emits events; db/health/findings.py evaluates
them. None waits for a device, and an error disables only its own kind (see best_effort.py).
"""
