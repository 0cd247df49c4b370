"""Parts of the tests of checkpoints that other tests use, too."""

from typing import Any


def saved(step: int, sha256: str = "aa", request: int | None = None) -> dict[str, Any]:
    path = f"checkpoints/step-{step:08}.pt"
    file = {"kind": "checkpoint", "path": path, "size_bytes": 10, "sha256": sha256}
    return {"step": step, "reason": "interval", "request": request, "files": [file]}


def in_shards(step: int, ranks: int) -> dict[str, Any]:
    """A checkpoint with a part from each rank."""
    event = saved(step)
    for name in ("metadata", *map(str, range(ranks))):
        file = {"kind": f"shard.{name}", "path": f"checkpoints/step-{step:08}/{name}"}
        event["files"].append({**file, "size_bytes": 100, "sha256": "dd"})
    return event


def saved_weights(step: int, *modules: str) -> dict[str, Any]:
    """A checkpoint with a file of weights for each module, and their averages."""
    event = saved(step)
    for module in modules or ("",):
        for kind in ("weights", "ema"):
            name = f"{kind}{module and f'.{module}'}"
            file = {"kind": name, "path": f"checkpoints/{step}.{name}.safetensors"}
            event["files"].append({**file, "size_bytes": 3, "sha256": "cc"})
    return event
