"""Client calls about files of runs, uploads and storage."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from halfstep.api_client.connection import Connection
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import content, spoken

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        ArtifactFile,
        CheckpointFileRow,
        Storage,
        Uploaded,
    )

STORING_SECONDS = 600.0  # timeout of an upload: the server moves gigabytes to a bucket
PIECE_BYTES = 1 << 20


class FileCalls(Connection):
    """The part of `halfstep.Client` for files of runs."""

    def checkpoints(self, run_id: int) -> "list[CheckpointFileRow]":
        """Return a run's checkpoint files, newest step first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/checkpoints", "checkpoints"))

    def download(
        self,
        run_id: int,
        folder: Path | str = ".",
        *,
        step: int | None = None,
        kind: str = "",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Download a file of a run's checkpoint into a folder; return its path.

        step: by default the newest.  kind: "checkpoint", the whole state, or "weights"; by default
        "checkpoint", or the only file if there is just one.
        on_progress: called from time to time with the number of bytes received and the total.
        Resumes an interrupted download. Raises ApiError if the SHA-256 differs from the server's.
        """
        files = [f for f in self.checkpoints(run_id) if step is None or f["step"] == step]
        matches = [f for f in files if f["kind"] == (kind or "checkpoint")]
        if not kind and len(files) == 1:
            matches = files
        if not matches:
            at = "" if step is None else f" at step {step}"
            named = [f"--kind {f['kind']} at step {f['step']}" for f in self.checkpoints(run_id)]
            existing = f"available: {', '.join(named) or 'none yet'}"
            text = f"run {run_id} has no file of the kind {kind or 'checkpoint'}{at}; {existing}"
            raise ApiError(404, text)
        [file, *_] = matches
        same_step = [f["kind"] for f in files if f["step"] == file["step"]]
        if file["kind"] == "checkpoint" and any(kind.startswith("shard.") for kind in same_step):
            raise ApiError(
                409,
                f"the state at step {file['step']} is sharded, which only a run can load; download "
                "its weights (kind weights), or a requested or the last checkpoint",
            )
        path = f"/runs/{run_id}/checkpoints/{file['id']}/download"
        partial = Path(folder) / f".{file['sha256']}.partial"
        partial.parent.mkdir(parents=True, exist_ok=True)
        name = self._fetch(path, partial, lambda done: on_progress(done, file["size_bytes"]))
        with partial.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file["sha256"]:
            partial.unlink()
            raise ApiError(0, f"{name} is damaged: its SHA-256 is {digest}, not {file['sha256']}")
        return partial.replace(Path(folder) / name)

    def upload_weights(
        self,
        path: Path | str,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Uploaded":
        """Upload a .safetensors or .pt file; its "upload" is the value for `weights.upload`.

        A file that no run starts from is deleted after a day.  on_progress: called with the number
        of bytes sent and the total. Raises ApiError, also if the server received other bytes.
        """
        path, digest = Path(path), hashlib.sha256()
        size = path.stat().st_size

        def pieces() -> Iterator[bytes]:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                    yield piece
                    on_progress(file.tell(), size)

        headers = {"Content-Length": str(size)}
        with spoken():
            address = f"/api/v1/uploads/{quote(path.name, safe='', errors='replace')}"
            answer = self._http.put(
                address, content=pieces(), headers=headers, timeout=STORING_SECONDS
            )
            stored = content(answer)
        if stored["sha256"] != digest.hexdigest():
            received = stored["sha256"]
            text = f"the server received SHA-256 {received}, not {digest.hexdigest()}"
            raise ApiError(0, f"{path} was damaged in the upload: {text}; upload it again")
        return stored

    def artifacts(self, run_id: int) -> "list[ArtifactFile]":
        """Return a run's artifacts: images, texts and tables, newest step first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/artifacts", "artifacts"))

    def storage(self) -> "Storage":
        """Return the server's free space, and the space that files of runs use."""
        return self._get("/api/v1/storage")
