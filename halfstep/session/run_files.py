"""Files that a script adds to its run: logged media, checkpoints and artifacts."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.session.logged_values import files_of
from halfstep.session.queued_run import QueuedRun, project_of
from halfstep.session.run_upload import RunUpload
from halfstep.telemetry import refuge
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.event_codec import BadEvent
from halfstep.telemetry.events import Artifact, Checkpoint, CheckpointFile
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.plain_json import clean
from halfstep.telemetry.run_folder import slug

if TYPE_CHECKING:
    from halfstep.session.artifacts import SavedVersion


class RunFiles:
    """Files in the folder of a run."""

    def __init__(
        self,
        files: AttemptFiles,
        queued: QueuedRun | None,
        spool: PatientSpool,
        upload: RunUpload,
        complain: Callable[[str], None],
    ) -> None:
        self._files, self._folder, self._queued = files, files.folder, queued
        self._spool, self._upload, self._complain = spool, upload, complain

    def log(self, name: str, value: object, step: int) -> None:
        """Write a logged value that is not a number."""
        for file_name, content in files_of(name, value):
            path = f"artifacts/step-{step:08}/{file_name}"
            self._write(path, content)
            size, digest = len(content), hashlib.sha256(content).hexdigest()
            event = Artifact(step=step, name=file_name, path=path, size_bytes=size, sha256=digest)
            self._spool.event(event)

    def save_file(self, path: Path, name: str, step: int) -> None:
        """Copy a file of the script. Raises OSError."""
        name = slug(name.replace(os.sep, "."))
        name = name if Path(name).suffix[1:].isalnum() else f"{name}.file"
        place = self._inside(Path(f"artifacts/step-{step:08}")) / name
        shutil.copyfile(path, place)
        stored_path, size, digest = self._of(place)
        event = Artifact(step=step, name=name, path=stored_path, size_bytes=size, sha256=digest)
        self._spool.event(event)

    def checkpoint(self, path: Path, step: int, kind: str, *, upload: bool) -> None:
        """Register a checkpoint, as a link if the script keeps its file and has no upload."""
        if not path.is_file():
            self._complain(f"{path} is not a file, and is not registered as a checkpoint")
            return
        folder = Path("checkpoints") / f"step-{step:08}"
        place = self._inside(folder if kind == "checkpoint" else folder / slug(kind))
        place /= clean(path.name)
        place.unlink(missing_ok=True)
        # The script may overwrite the file before it is uploaded or stored.
        if upload or self._queued or not _link(place, path):
            shutil.copyfile(path, place)
        stored_path, size, digest = self._of(place)
        file = CheckpointFile(kind=kind, path=stored_path, size_bytes=size, sha256=digest)
        try:
            self._spool.event(Checkpoint(step=step, reason="script", files=[file], upload=upload))
        except BadEvent as error:
            self._complain(f"{path} is not registered: {error}")

    def save_artifact(
        self,
        path: "str | Path | Mapping[str, str | Path]",
        name: str,
        type_: str,
        aliases: Sequence[str],
    ) -> "SavedVersion":
        """Save a version of an artifact. Raises ArtifactError and OSError."""
        from halfstep.session import artifacts

        event = artifacts.save(self._folder, path, name, type_, aliases)
        self._spool.event(event)
        if not self._queued:
            project = project_of(self._files)
            artifacts.remember_saved(self._folder, event, project, self._upload.server)
        return artifacts.version_of(event)

    def _write(self, path: str, content: bytes) -> None:
        """Write a file of the run, in its refuge if its folder cannot hold it."""
        place = self._folder / path
        try:
            self._inside(Path(path).parent)
            place.write_bytes(content)
        except OSError:
            if self._queued:
                raise
            with suppress(OSError):
                place.unlink()
            place = refuge.open_refuge(self._folder) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)

    def _inside(self, folder: Path) -> Path:
        """Create a folder within the run's folder, and return its path."""
        place = self._folder / folder
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _of(self, place: Path) -> tuple[str, int, str]:
        """Return a file's path, size in bytes and SHA-256 as an event holds them."""
        with place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return place.relative_to(self._folder).as_posix(), place.stat().st_size, digest


def _link(place: Path, path: Path) -> bool:
    """Hard-link a file; return False if that fails, as across file systems."""
    try:
        place.hardlink_to(path)
    except OSError:
        return False
    return True
