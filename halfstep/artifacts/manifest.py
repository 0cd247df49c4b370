"""Files of an artifact version, and the digest of their content.

A version is a file or a folder. Its digest is the SHA-256 of its list of files, each with path,
size and SHA-256, so the same content has the same digest on every machine.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from halfstep.artifacts.names import ENTRY_CHARACTERS, MOST_FILES, ArtifactError, entry_problem


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


def files_in(path: Path) -> list[tuple[str, Path]]:
    """Return the files of a file or folder, each with its path within the version.

    A link within a folder is followed if it leads to a file within the folder. Raises
    ArtifactError.
    """
    if path.is_file():
        named = [(path.name, path)]
    elif path.is_dir():
        named = list(_files_below(path))
    else:
        raise ArtifactError(f"{path} does not exist; allowed: a file or a folder")
    if not named:
        raise ArtifactError(f"{path} has no files; allowed: a file or a folder with files")
    if len(named) > MOST_FILES:
        raise ArtifactError(
            f"{path} has more than {MOST_FILES:,} files; allowed: at most that many. "
            "Pack them into an archive"
        )
    for name, _ in named:
        if problem := entry_problem(name):
            raise ArtifactError(f"{name[:ENTRY_CHARACTERS]!r}: {problem}")
    return named


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    root = folder.resolve()
    count = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if not path.is_file():  # a socket, or a link to nothing
                continue
            if not path.resolve().is_relative_to(root):
                raise ArtifactError(f"{path} is a link out of {folder}; allowed: files within it")
            yield path.relative_to(folder).as_posix(), path
            count += 1
            if count > MOST_FILES:
                return


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
