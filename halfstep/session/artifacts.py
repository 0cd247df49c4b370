"""Saving and using of named artifacts by a watched script."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from halfstep.api_client.credentials import Credentials
from halfstep.artifacts import cache, names
from halfstep.artifacts.cache import Manifest
from halfstep.artifacts.manifest import Entry, check_entries, digest_of, files_in, sha256_of
from halfstep.artifacts.names import ArtifactError, Reference, parse_reference
from halfstep.cli import command_sources
from halfstep.session.step_numbers import BadArgument
from halfstep.telemetry.events import ArtifactFile, SavedArtifact, UsedArtifact
from halfstep.telemetry.run_folder import script_path

BLOBS = "blobs"  # folder of the run with saved content, each file named by its SHA-256
PIECE_BYTES = 1 << 20
CODE_FILES = 1000  # most that the code of a run has


class SavedVersion(NamedTuple):
    """Result of `watch.save_artifact`; as text it is a reference, for `watch.use`.

    The server numbers versions; the digest is known at once, and without a server.
    """

    name: str
    type: str
    digest: str
    size_bytes: int
    files: int

    def __str__(self) -> str:
        return f"{self.name}@{self.digest[:12]}"


def save(
    folder: Path,
    path: str | Path | Mapping[str, str | Path],
    name: str,
    type_: str,
    aliases: Sequence[str],
) -> SavedArtifact:
    """Copy files into a run's folder, and return the event of its version.

    Content that the run's folder has already is not copied again. Raises ArtifactError.
    """
    entries = [Entry(name, *_store(folder / BLOBS, place)) for name, place in files_in(path)]
    check_entries(entries)
    files = [
        ArtifactFile(
            name=entry.path,
            path=f"{BLOBS}/{entry.sha256}",
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
        )
        for entry in entries
    ]
    return SavedArtifact(
        name=name,
        type=type_,
        digest=digest_of(entries),
        is_file=not isinstance(path, Mapping) and Path(path).is_file(),
        aliases=list(aliases),
        files=files,
    )


def code_files(folder: str | Path | None, is_included: Callable[[Path], bool]) -> dict[str, Path]:
    """Return the code below a folder, by path: at most CODE_FILES files of MOST_BYTES each.

    folder: by default that of the script.  Raises BadArgument without code.
    """
    script = script_path()
    root = Path(folder or (script.parent if script else "."))
    files: dict[str, Path] = {}
    for path in islice(command_sources.code_in(root, is_included), CODE_FILES):
        with suppress(OSError):
            if path.stat().st_size <= command_sources.MOST_BYTES and os.access(path, os.R_OK):
                files[path.relative_to(root).as_posix()] = path
    if not files:
        raise BadArgument(f"there is no code in {root.absolute()}")
    return files


def _store(blobs: Path, path: Path) -> tuple[int, str]:
    """Copy a file to the folder of blobs, unless it is there; return its size and SHA-256."""
    size, sha256 = path.stat().st_size, sha256_of(path)
    blob = blobs / sha256
    if blob.is_file() and blob.stat().st_size == size:
        return size, sha256
    blobs.mkdir(parents=True, exist_ok=True)
    temporary = blobs / f".{os.getpid()}"
    digest, size = hashlib.sha256(), 0
    # Hashed again: the script may have written the file meanwhile.
    with path.open("rb") as file, temporary.open("wb") as copy:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            copy.write(piece)
            size += len(piece)
    temporary.replace(blobs / digest.hexdigest())
    return size, digest.hexdigest()


def version_of(event: SavedArtifact) -> SavedVersion:
    """Return a saved version, as the script sees it."""
    sizes = (file.size_bytes for file in event.files)
    return SavedVersion(event.name, event.type, event.digest, sum(sizes), len(event.files))


def remember_saved(
    folder: Path, event: SavedArtifact, project: str, server: Credentials | None
) -> None:
    """Let scripts on this machine use a version before a server has it, or without a server.

    With a server only by its digest: which version is the latest depends on others, too.
    """
    manifest = Manifest(
        project=project,
        name=event.name,
        digest=event.digest,
        is_file=event.is_file,
        entries=[Entry(file.name, file.size_bytes, file.sha256) for file in event.files],
        source=str(folder / BLOBS),
    )
    versions = [f"@{event.digest}", f"@{event.digest[:12]}"]
    if server is None:
        versions += [names.LATEST, *event.aliases]
    for version in versions:
        cache.remember(server.url if server else "", version, manifest)


def use(
    text: str,
    *,
    project: str,
    server: Credentials | None,
    say: Callable[[str], None],
) -> tuple[Path, UsedArtifact]:
    """Return the verified local files of a version, and the event of its use.

    project: of a reference without one.  server: None: only versions that this machine has.
    Raises ArtifactError, ApiError, OSError.
    """
    reference = parse_reference(text)
    if reference.project is None:
        reference = reference._replace(project=project)
    manifest = _manifest(text, reference, server, say)
    try:
        path = cache.local_path(manifest, cache.copy_from(manifest.source))
    except FileNotFoundError:  # neither the cache nor the folder of a run has all of its files
        path = _download(manifest, server)
    event = UsedArtifact(project=manifest.project, name=manifest.name, digest=manifest.digest)
    return path, event


def _manifest(
    text: str, reference: Reference, server: Credentials | None, say: Callable[[str], None]
) -> Manifest:
    """Return the version that a reference names: from the server, or else as known here.

    Only a whole digest needs no server: another server can follow at the same URL, whose v0 has
    other content.
    """
    project, url = reference.project or "", server.url if server else ""
    version = str(reference.version)
    known = cache.recall(url, project, reference.name, version)
    if server is None:
        if known is None:
            raise ArtifactError(
                f"there is no {text!r} on this machine, and no server is configured; allowed: a "
                "version that was saved or used here, or a server (`halfstep login`)"
            )
        return known
    if known and reference.version.digest == known.digest:
        return known
    from halfstep.api_client.artifact_calls import manifest_of
    from halfstep.api_client.errors import ApiError
    from halfstep.client import Client

    try:
        with Client(server.url, server.token) as client:
            manifest = manifest_of(client.artifact_version(text, project=project))
    except (ApiError, ArtifactError) as error:
        if known and reference.version.digest:  # saved here, and not uploaded completely yet
            return known
        if known is None or isinstance(error, ArtifactError) or error.status:
            raise
        say(f"{error}; using {reference.name}:{version} as it was used here last")
        return known
    cache.remember(url, version, manifest)
    return manifest


def _download(manifest: Manifest, server: Credentials | None) -> Path:
    """Download a version, found by its digest: the server may know it by another id."""
    from halfstep.api_client.artifact_calls import manifest_of
    from halfstep.client import Client

    if server is None:
        place = manifest.source or str(cache.cache_folder())
        raise ArtifactError(
            f"{manifest.name}: its files are no longer in {place}, and no server is configured; "
            "allowed: a server that has them (`halfstep login`)"
        )
    text = f"{manifest.project}/{manifest.name}@{manifest.digest}"
    with Client(server.url, server.token) as client:
        return client.download_version(manifest_of(client.artifact_version(text)))
