"""Which source files are the training script's own."""

import sysconfig
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
_OWN = tuple(
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, *map(_ROOT.joinpath, ("halfstep", "trainer")))
)
_RECIPES = f"{_ROOT}/trainer/recipes/"
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib"))


def is_of_script(path: str) -> bool:
    """Return whether a source file is neither installed nor generated."""
    return not (path.startswith((*_INSTALLED, "<")) or is_own(path))


def is_own(path: str) -> bool:
    """Return whether a source file is torch's or Halfstep's, other than a recipe."""
    return path.startswith(_OWN) and not path.startswith(_RECIPES)
