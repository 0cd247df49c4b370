"""Code of a command, by the SHA-256 of its files: a script can be edited while it is queued."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

MOST_FILES, MOST_BYTES = 50, 2**20
MOST_FOLDERS = 200  # that are searched
SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml")
#: Folders without code of the command.
OTHERS = {"__pycache__", "node_modules", "site-packages", "halfstep-runs", "wandb", "outputs"}


def sources_of(words: Sequence[str], folder: str) -> dict[str, str]:
    """Return the digests of a command's script and of the code in its folder, by path.

    Empty if they are not on this machine. At most MOST_FILES, those nearest to the folder first.
    """
    root = Path(folder) if folder else None
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    modules = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    for module in modules:
        place = module.replace(".", "/")
        scripts += [f"{place}.py", f"{place}/__main__.py"]
    if root is None:
        scripts = [name for name in scripts if name.startswith("/")]
    found: dict[str, str] = {}
    code = (path.relative_to(root).as_posix() for path in code_in(root)) if root else ()
    for name in [*scripts, *code]:
        digest = _digest(Path(folder, name))
        if digest is not None:
            found[name] = digest
        if len(found) == MOST_FILES:
            break
    return found


def list_changed(sources: Mapping[str, str], folder: Path) -> list[str]:
    """Return the paths of the files that have changed, or are gone."""
    return [path for path, digest in sources.items() if _digest(folder / path) != digest]


def is_code(path: Path) -> bool:
    """Return whether a file's name is that of code."""
    return path.suffix in SUFFIXES


def code_in(root: Path, is_included: Callable[[Path], bool] = is_code) -> Iterator[Path]:
    """Yield the code files below a folder, level by level, without hidden and unrelated folders."""
    level = [root]
    for _ in range(MOST_FOLDERS):
        if not level:
            return
        folder = level.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            path = Path(entry.path)
            if entry.is_file() and is_included(path):
                yield path
            is_own = path.name not in OTHERS and not (path / "pyvenv.cfg").exists()
            if is_own and entry.is_dir():
                level.append(path)


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a regular file of at most MOST_BYTES; None of any other."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
