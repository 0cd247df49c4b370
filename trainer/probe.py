"""What this machine can train, as one JSON object: `python -m trainer.probe`.

The worker, which has no torch, asks this short-lived process, and advertises the answer.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

from halfstep.run_config import config_schema
from trainer import machine
from trainer.registry import MissingRequirementError, known_recipes, load_recipe


def main() -> None:
    """Print devices, recipes and versions."""
    answer = {"devices": devices(), "recipes": recipes(), "versions": machine.versions()}
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")


def devices() -> list[dict[str, Any]]:
    """Return every CUDA device, or the CPU as one device where there is none."""
    if not torch.cuda.is_available():
        return [
            {
                "kind": "cpu",
                "index": 0,
                "name": machine.device_name(torch.device("cpu")),
                "memory_bytes": machine.host_memory_bytes(),
                "compute_capability": None,
                "fp16": True,  # slow, but the arithmetic and the overflows are real
                "bf16": True,
                "tf32": False,
            }
        ]
    return [_cuda_device(index) for index in range(torch.cuda.device_count())]


def recipes() -> list[dict[str, Any]]:
    """Return every recipe with the schema of its configuration.

    One that is broken comes with its error instead, one that lacks packages with what it needs.
    """
    return [_recipe(reference) for reference in known_recipes()]


def _cuda_device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return {
        "kind": "cuda",
        "index": index,
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "fp16": capability >= (5, 3),  # the first with fp16 arithmetic
        "bf16": capability >= (8, 0),
        "tf32": capability >= (8, 0),
    }


def _recipe(reference: str) -> dict[str, Any]:
    try:
        recipe = load_recipe(reference)
        return {
            "name": reference,
            "title": recipe.title,
            "description": recipe.description,
            "schema": config_schema(recipe),
            "file": _file(recipe),
        }
    except MissingRequirementError as error:
        return {"name": reference, "needs": error.needs}
    except (Exception, SystemExit) as error:  # a user's broken recipe must not hide the others
        return {"name": reference, "error": f"{type(error).__name__}: {error}"}


def _file(recipe: type) -> str | None:
    """Return where the source of a recipe lies, if it is in a file."""
    try:
        found = inspect.getsourcefile(recipe)
    except TypeError:
        return None
    return str(Path(found).resolve()) if found else None


if __name__ == "__main__":
    main()
