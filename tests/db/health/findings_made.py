"""Shared helpers of the tests of findings."""

from typing import Any


def make_weights(**changes: Any) -> dict[str, Any]:
    """Return the event of loaded weights."""
    lists: dict[str, Any] = {"missing": [], "unexpected": [], "mismatched": []} | changes
    counts = {f"{name}_count": len(names) for name, names in lists.items()}
    event = {"event": "weights", "step": 0, "source": "/data/models/net.safetensors"}
    return event | {"loaded": 12, "count": 14} | lists | counts
