"""Shared helpers of the tests of checkpoints."""

from typing import Any


def make_saved(step: int, sha256: str = "aa", request: int | None = None) -> dict[str, Any]:
    path = f"checkpoints/step-{step:08}.pt"
    file = {"kind": "checkpoint", "path": path, "size_bytes": 10, "sha256": sha256}
    return {"step": step, "reason": "interval", "request": request, "files": [file]}


def in_shards(step: int, ranks: int) -> dict[str, Any]:
    """Return the event of a checkpoint with one file for each rank."""
    event = make_saved(step)
    for name in ("metadata", *map(str, range(ranks))):
        file = {"kind": f"shard.{name}", "path": f"checkpoints/step-{step:08}/{name}"}
        event["files"].append({**file, "size_bytes": 100, "sha256": "dd"})
    return event


def make_saved_weights(step: int, *modules: str) -> dict[str, Any]:
    """Return the event of a checkpoint with weights and averages of each module."""
    event = make_saved(step)
    for module in modules or ("",):
        for kind in ("weights", "ema"):
            name = f"{kind}{module and f'.{module}'}"
            file = {"kind": name, "path": f"checkpoints/{step}.{name}.safetensors"}
            event["files"].append({**file, "size_bytes": 3, "sha256": "cc"})
    return event
