"""Which source files are the training script's own."""

import sysconfig
from pathlib import Path

import torch

_OTHERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")),
    )
)


def is_of_script(path: str) -> bool:
    """Return whether a source file is neither installed nor generated."""
    return not path.startswith((*_OTHERS, "<"))
