"""Storage and queries of recorded training data: steps, metrics and events."""
