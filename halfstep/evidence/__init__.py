"""What a watched loop does that explains its skips, its scale and its losses.

Each module here observes one kind of evidence and emits events for it; db/health/findings.py weighs
them. None waits for a device, and what raises costs its own kind only (see careful.py).
"""
