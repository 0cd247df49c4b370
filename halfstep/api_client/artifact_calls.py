"""Client calls about named artifacts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from halfstep.api_client.connection import Connection
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import content, spoken
from halfstep.artifacts import cache
from halfstep.artifacts.cache import Manifest
from halfstep.artifacts.manifest import Entry, files_in, sha256_of
from halfstep.artifacts.names import ArtifactError, parse_reference
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        ArtifactDetail,
        ArtifactSummary,
        SavedVersion,
        VersionDetail,
        VersionDiff,
        VersionSummary,
    )

PIECE_BYTES = 4 << 20
STORING_SECONDS = 600.0  # timeout of a piece: the last one waits for the server's storage

OnProgress = Callable[[int, int], None]


class ArtifactCalls(Connection):
    """The part of `halfstep.Client` for named artifacts.

    A reference is NAME, NAME:v3, NAME:best, NAME@DIGEST, each with PROJECT/ before it.
    """

    def named_artifacts(self, project: str | None = None) -> "Iterator[ArtifactSummary]":
        """Yield the named artifacts of one or all visible projects, newest first."""
        query = {} if project is None else {"project": project}
        return self._pages("/api/v1/artifacts", "artifacts", query)

    def artifact_version(self, reference: str, *, project: str = "") -> "VersionDetail":
        """Return a version with its files. project: of a reference without one."""
        parts = parse_reference(reference)
        query = {"name": parts.name, "version": str(parts.version)}
        query["project"] = project if parts.project is None else parts.project
        return self._get("/api/v1/artifacts/version", query)

    def artifact_versions(self, reference: str, *, project: str = "") -> "ArtifactDetail":
        """Return an artifact with all of its versions, newest first."""
        artifact = self.artifact_version(reference, project=project)["artifact"]
        return self._get(f"/api/v1/artifacts/{artifact['id']}")

    def artifact_diff(self, before: str, after: str, *, project: str = "") -> "VersionDiff":
        """Return the files that differ between two versions."""
        earlier, later = (self.artifact_version(r, project=project)["id"] for r in (before, after))
        path = f"/api/v1/artifact-versions/{later}/diff"
        return self._get(path, {"against": earlier})

    def save_artifact(
        self,
        path: Path | str,
        *,
        name: str,
        type: str = "artifact",  # noqa: A002 - as the API calls it
        project: str = "",
        aliases: Sequence[str] = (),
        on_progress: OnProgress = lambda done, total: None,
    ) -> "SavedVersion":
        """Save a file or folder as a version; content that is there already makes no new one.

        on_progress: called with the number of bytes that the server has, and the total. May be
        repeated after an error. Raises ApiError, ArtifactError.
        """
        path = Path(path)
        files = dict(_entries(path))
        body: JsonObject = {"project": project, "name": name, "type": type}
        body |= {"is_file": path.is_file(), "aliases": list(aliases)}
        body["files"] = [entry._asdict() for entry in files]
        saved: SavedVersion = self._post("/api/v1/artifacts", body)
        missing = set(saved["missing"])
        total = sum(entry.size_bytes for entry in files)
        done = total - sum(entry.size_bytes for entry in files if entry.sha256 in missing)
        for entry, place in files.items():
            if entry.sha256 in missing:
                missing.remove(entry.sha256)
                for sent in self._send_blob(saved["id"], entry, place):
                    on_progress(done + sent, total)
                done += entry.size_bytes
        return {**saved, "missing": [], "is_complete": True}

    def _send_blob(self, version_id: int, entry: Entry, path: Path) -> Iterator[int]:
        """Send a file, and yield after each piece how many bytes the server has."""
        address = f"/api/v1/artifact-versions/{version_id}/blobs/{entry.sha256}"
        offset, is_stored = 0, False
        while not is_stored:
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read(PIECE_BYTES)
            with spoken():
                query = {"offset": offset, "size": entry.size_bytes}
                answer = self._http.put(
                    address, params=query, content=piece, timeout=STORING_SECONDS
                )
                if answer.status_code == 409 and answer.json().get("code") == "offset":
                    reached: JsonObject = {"offset": int(answer.json()["offset"]), "stored": False}
                else:
                    reached = dict(content(answer))
            if reached["offset"] == offset and not reached["stored"]:
                raise ApiError(422, f"{path} has changed while it was uploaded; save it again")
            offset, is_stored = reached["offset"], reached["stored"]
            yield offset

    def download_artifact(
        self,
        reference: str,
        *,
        project: str = "",
        on_progress: OnProgress = lambda done, total: None,
    ) -> Path:
        """Download a version into the cache, verify it, and return its local path.

        The path is a folder, or the file that was saved as one. Raises ApiError, ArtifactError.
        """
        manifest = manifest_of(self.artifact_version(reference, project=project))
        return self.download_version(manifest, on_progress=on_progress)

    def download_version(
        self, manifest: Manifest, *, on_progress: OnProgress = lambda done, total: None
    ) -> Path:
        """Download a version, as `download_artifact` does."""
        total = sum(entry.size_bytes for entry in manifest.entries)
        done = 0

        def fetch(entry: Entry, path: Path) -> None:
            nonlocal done
            address = f"/api/v1/artifact-versions/{manifest.version_id}/files/{quote(entry.path)}"
            self._fetch(address, path, lambda received: on_progress(done + received, total))
            done += entry.size_bytes

        return cache.local_path(manifest, fetch)

    def set_alias(self, reference: str, alias: str, *, project: str = "") -> "VersionSummary":
        """Give an alias to a version; another version of the artifact loses it."""
        version = self.artifact_version(reference, project=project)
        path = f"/api/v1/artifact-versions/{version['id']}/aliases/{quote(alias, safe='')}"
        with spoken():
            return content(self._http.put(path))

    def remove_alias(self, name: str, alias: str, *, project: str = "") -> None:
        """Remove an alias of an artifact."""
        artifact = self.artifact_version(f"{name}:{alias}", project=project)["artifact"]
        self._delete(f"/api/v1/artifacts/{artifact['id']}/aliases/{quote(alias, safe='')}")

    def delete_artifact(self, reference: str, *, project: str = "", force: bool = False) -> None:
        """Delete a version. force: although runs that have ended used it."""
        version = self.artifact_version(reference, project=project)
        self._delete(f"/api/v1/artifact-versions/{version['id']}", {"force": force})


def manifest_of(version: "VersionDetail") -> Manifest:
    """Return a version of the API as the cache needs it. Raises ArtifactError."""
    artifact = version["artifact"]
    if not version["is_complete"]:
        raise ArtifactError(
            f"{artifact['name']}:{version['version']} is not uploaded completely yet; allowed: a "
            "complete version, or this one once all of its files are saved"
        )
    entries = [Entry(f["path"], f["size_bytes"], f["sha256"]) for f in version["entries"]]
    return Manifest(
        project=artifact["project"],
        name=artifact["name"],
        digest=version["digest"],
        is_file=version["is_file"],
        entries=entries,
        version=version["version"],
        version_id=version["id"],
    )


def _entries(path: Path) -> Iterator[tuple[Entry, Path]]:
    for name, place in files_in(path):
        yield Entry(name, place.stat().st_size, sha256_of(place)), place
