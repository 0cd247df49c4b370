"""Files and code that a script saves with its run."""

import os
from collections.abc import Callable
from glob import glob
from inspect import signature
from pathlib import Path

from halfstep.cli.command_sources import is_code
from halfstep.wandb_compat.unsupported import say_once

MOST_FILES = 1000  # per `save`


def find_files(pattern: str, base_path: str | Path | None) -> dict[Path, str]:
    """Return the files that match, with their names in the run.

    base_path: the folder that their names begin below, by default the current one.
    """
    matching = sorted(glob(pattern, recursive=True))  # noqa: PTH207 - it may be absolute
    files = [path for path in map(Path, matching) if path.is_file()]
    if not files:
        say_once(f"save({pattern!r}) matches no file, and nothing is uploaded")
    elif len(files) > MOST_FILES:
        few = f"the first {MOST_FILES:,} of {len(files):,} files"
        say_once(f"save({pattern!r}) uploads {few}; allowed: at most that many")
    named = {}
    for path in files[:MOST_FILES]:
        name = os.path.relpath(path, base_path) if base_path else str(path)
        named[path] = path.name if path.is_absolute() or name.startswith("..") else name
    return named


def filter_code(
    root: str, include: Callable[..., bool] | None, exclude: Callable[..., bool] | None
) -> Callable[[Path], bool]:
    """Return the filter of `log_code`, whose own are functions of the script."""

    def is_included(path: Path) -> bool:
        is_chosen = is_code(path) if include is None else _call_filter(include, path, root)
        return is_chosen and not (exclude and _call_filter(exclude, path, root))

    return is_included


def _call_filter(chooses: Callable[..., bool], path: Path, root: str) -> bool:
    """Call a function of the script, which takes a path, and the root if it has a place for it."""
    takes_root = len(signature(chooses).parameters) > 1
    return bool(chooses(str(path), root) if takes_root else chooses(str(path)))
