"""Local cache of artifact versions: their files, and which version a reference named.

    <cache>/versions/<digest>/…        the files of a version, read-only
    <cache>/references/<hash>.json     the version that a reference named last

The cache is the folder that HALFSTEP_CACHE names, else halfstep/artifacts in the user's cache.
Files are verified each time they are used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from halfstep.artifacts.manifest import Entry, check_entries, digest_of, sha256_of
from halfstep.artifacts.names import ArtifactError
from halfstep.telemetry.folder_lock import FolderLock

Fetch = Callable[[Entry, Path], None]


class Manifest(NamedTuple):
    """A version as a server or a script knows it."""

    project: str
    name: str
    digest: str
    is_file: bool
    entries: Sequence[Entry]
    version: str = ""  # v3; empty for one that no server has numbered
    version_id: int = 0  # on the server
    source: str = ""  # folder with its files by SHA-256, of a script without a server


def cache_folder() -> Path:
    """Return the folder of the cache."""
    if named := os.environ.get("HALFSTEP_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halfstep" / "artifacts"


def local_path(manifest: Manifest, fetch: Fetch) -> Path:
    """Return the verified files of a version: a folder, or the file that was saved as one.

    fetch: downloads a missing file; it may continue a partial one. Raises ArtifactError, OSError,
    and what fetch raises.
    """
    check_entries(manifest.entries)
    if digest_of(manifest.entries) != manifest.digest:
        raise ArtifactError(f"the list of files of {manifest.name} does not match its digest")
    folder = cache_folder() / "versions" / manifest.digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder.with_name(f"{folder.name}.lock"))
    lock.wait()  # several ranks need the same version
    try:
        for entry in manifest.entries:
            _ensure(folder, entry, fetch)
    finally:
        lock.release()
    return folder / manifest.entries[0].path if manifest.is_file else folder


def _ensure(folder: Path, entry: Entry, fetch: Fetch) -> None:
    """Fetch a file unless it is there and intact."""
    path = folder / entry.path
    if _is_intact(path, entry):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}-{entry.sha256}")  # under the lock of its version
    for _ in range(2):  # a damaged partial file is fetched again as a whole
        fetch(entry, partial)
        if _is_intact(partial, entry):
            partial.chmod(0o444)
            partial.replace(path)
            return
        partial.unlink(missing_ok=True)
    raise ArtifactError(f"{entry.path} is damaged: its SHA-256 is not {entry.sha256}")


def _is_intact(path: Path, entry: Entry) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat().st_size == entry.size_bytes and sha256_of(path) == entry.sha256
    return False


def copy_from(source: str) -> Fetch:
    """Return a function that copies files of a version from where it was saved.

    source: a folder with files by SHA-256. It raises FileNotFoundError without one.
    """

    def copy(entry: Entry, path: Path) -> None:
        if not source:
            raise FileNotFoundError(entry.path)
        shutil.copyfile(Path(source) / entry.sha256, path)

    return copy


# ---- References -------------------------------------------------------------------------------


def remember(server: str, version: str, manifest: Manifest) -> None:
    """Store which version a reference names. server: URL; empty: none."""
    path = _reference_file(server, manifest.project, manifest.name, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(manifest._asdict()))
    temporary.replace(path)


def recall(server: str, project: str, name: str, version: str) -> Manifest | None:
    """Return the version that a reference named last; None if there is none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = json.loads(_reference_file(server, project, name, version).read_text())
        content["entries"] = [Entry(*entry) for entry in content["entries"]]
        return Manifest(**content)
    return None


def _reference_file(server: str, project: str, name: str, version: str) -> Path:
    key = json.dumps([server, project, name, version])
    file_name = f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    return cache_folder() / "references" / file_name
