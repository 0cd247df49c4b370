"""Files of an artifact version, and the digest of their content.

A version is a file or a folder. Its digest is the SHA-256 of its list of files, each with path,
size and SHA-256, so the same content has the same digest on every machine.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from halfstep.artifacts.names import ENTRY_CHARACTERS, MOST_FILES, ArtifactError, entry_problem

MOST_NAMED = 10  # files that a message names


class Entry(NamedTuple):
    """A file of a version."""

    path: str  # within the version, with "/"
    size_bytes: int
    sha256: str


def digest_of(entries: Iterable[Entry]) -> str:
    """Return the digest of a version: the SHA-256 of its list of files in order of path."""
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(f"{entry.sha256} {entry.size_bytes} {entry.path}\n".encode())
    return digest.hexdigest()


def check_entries(entries: Collection[Entry]) -> None:
    """Check that the files of a version can be written to one folder. Raises ArtifactError."""
    if not 1 <= len(entries) <= MOST_FILES:
        raise ArtifactError(f"{len(entries):,} files; allowed: 1 to {MOST_FILES:,}")
    paths = {entry.path for entry in entries}
    if len(paths) < len(entries):
        raise ArtifactError("two files have the same path; use different paths")
    for path in sorted(paths):
        if problem := entry_problem(path):
            raise ArtifactError(f"the path {path[:200]!r}: {problem}")
        if parent := next((str(p) for p in PurePosixPath(path).parents if str(p) in paths), None):
            raise ArtifactError(f"{parent[:200]!r} is a file, and a folder of {path[:200]!r}")


def files_in(path: str | Path | Mapping[str, str | Path]) -> list[tuple[str, Path]]:
    """Return the files of a file, a folder or a mapping, each with its path within the version.

    Links within a folder are followed. Raises ArtifactError, which names what cannot be stored, and
    OSError.
    """
    if isinstance(path, Mapping):
        named = [(name, Path(place)) for name, place in path.items()]
        if missing := [place for _, place in named if not place.is_file()]:
            raise ArtifactError(f"{missing[0]} {_reason(missing[0])}; allowed: files")
    elif Path(path).is_dir():
        named = _files_below(Path(path))
    else:
        named = [(Path(path).name, Path(path))]
        if not Path(path).is_file():
            raise ArtifactError(f"{path} {_reason(Path(path))}; allowed: a file or a folder")
    if not named:
        raise ArtifactError(f"{path} has no files; allowed: a file or a folder with files")
    for name, _ in named:
        if problem := entry_problem(name):
            raise ArtifactError(f"{name[:ENTRY_CHARACTERS]!r}: {problem}")
    return named


def _files_below(folder: Path) -> list[tuple[str, Path]]:
    root = os.path.realpath(folder)
    named: list[tuple[str, Path]] = []
    problems: list[str] = []

    def visit(place: Path, above: tuple[str, ...]) -> None:
        for path in sorted(place.iterdir()):
            name, real = path.relative_to(folder).as_posix(), os.path.realpath(path)
            is_folder, is_file = path.is_dir(), path.is_file()
            if not is_folder and not is_file:
                problems.append(f"{name} {_reason(path)}")
            elif os.path.commonpath([root, real]) != root:
                problems.append(f"{name} is a link out of the folder")
            elif is_file:
                named.append((name, path))
            elif real in above:
                problems.append(f"{name} is a link to a folder that contains it")
            else:
                visit(path, (*above, real))
            if len(named) > MOST_FILES:
                raise ArtifactError(
                    f"{folder} has more than {MOST_FILES:,} files; allowed: at most that many. "
                    "Pack them into an archive"
                )

    visit(folder, (root,))
    if problems:
        more = f"; and {len(problems) - MOST_NAMED:,} more" if len(problems) > MOST_NAMED else ""
        raise ArtifactError(
            f"{folder} cannot be saved completely: {'; '.join(problems[:MOST_NAMED])}{more}; "
            "allowed: files, folders, and links to those within it"
        )
    return named


def _reason(path: Path) -> str:
    """Return why a path that is no file cannot be stored."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is no file, but a FIFO, a socket or a device"
    return "is a link to nothing" if path.is_symlink() else "does not exist"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
