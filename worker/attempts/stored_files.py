"""Files of a run in the store, for one attempt that sends and deletes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from obstore.store import ObjectStore

from db.database import Database
from db.files import artifact_versions
from db.files.object_store import delete_files, is_in_place, put_file
from db.queue import queue
from db.runs import runs
from db.settings import Settings
from db.telemetry.recording import BlobId
from halfstep import untrusted_files
from halfstep.telemetry.events import File, SavedArtifact, UsedArtifact
from worker.attempts.renew_lease import wait_for
from worker.attempts.uploads import Stored, Uploads, files_of


class StoredFiles:
    """Files of the pending items that are in the store, or sent there in the background."""

    def __init__(
        self, settings: Settings, database: Database, store: ObjectStore, run_id: int, attempt: int
    ) -> None:
        self._settings, self._database, self._store = settings, database, store
        self._run_id, self._attempt = run_id, attempt
        self._folder, self._scratch = settings.run_folder(run_id), settings.scratch_folder(run_id)
        self._stored: set[str] = set()  # keys
        self._blob_keys: dict[BlobId, str] = {}  # of named artifacts
        self.is_in_place = is_in_place(store, settings.data)
        self.uploads = Uploads(self._send, partial(delete_files, store))  # for a bucket

    def store(self, files: Sequence[File], meanwhile: Callable[[], None]) -> list[str]:
        """Store those files that the store lacks; return the keys of all."""
        lacking = {key: file for file in files if (key := self._key(file)) not in self._stored}
        if lacking:
            self._check_fence()
        for key, file in lacking.items():
            wait_for(partial(self._send, file), meanwhile)
            self._stored.add(key)
        return [self._key(file) for file in files]

    def store_blobs(
        self, named: Sequence[SavedArtifact | UsedArtifact], meanwhile: Callable[[], None]
    ) -> dict[BlobId, str]:
        """Store the files of named artifacts that the project does not have yet; return keys."""
        saved = (event for event in named if isinstance(event, SavedArtifact))
        files = {(file.sha256, file.size_bytes): file for event in saved for file in event.files}
        if not files:
            return {}
        with self._database.reading() as session:
            project = runs.get(session, self._run_id).project
            known = artifact_versions.find_known_blobs(
                session, project, {sha256 for sha256, _ in files}
            )
        for blob, file in files.items():
            if blob not in known and blob not in self._blob_keys:
                key = artifact_versions.new_key(file.sha256)
                wait_for(partial(put_file, self._store, key, self._folder / file.path), meanwhile)
                self._blob_keys[blob] = key
        return self._blob_keys

    def collect_uploads(self, meanwhile: Callable[[], None] | None = None) -> list[Stored]:
        """Send waiting files; return the events whose files have arrived.

        meanwhile: called periodically until those on their way have; None: do not wait.
        """
        if self.uploads.can_begin:
            self._check_fence()
            self.uploads.begin()
        if meanwhile:
            wait_for(self.uploads.wait, meanwhile)
        arrived = self.uploads.collect()
        self._stored.update(self._key(file) for event in arrived for file in files_of(event))
        return arrived

    def await_uploads(self, meanwhile: Callable[[], None]) -> Iterator[Stored]:
        """Yield the events of waiting files once these are in the store."""
        while self.uploads:
            yield from self.collect_uploads(meanwhile)

    def delete(self, keys: list[str]) -> None:
        """Delete pruned files, from a bucket in the background."""
        if self.is_in_place:
            delete_files(self._store, keys)
        else:
            self.uploads.prune(keys)
        for key in keys:
            path = self._settings.data / key
            path.unlink(missing_ok=True)  # for a bucket
            with suppress(OSError):
                name = path.relative_to(self._folder).as_posix()
                untrusted_files.delete(self._scratch, name)
            # A folder of shards, of which this may be the last.
            if path.parent.name.startswith("step-"):
                with suppress(OSError):
                    path.parent.rmdir()

    def forget(self) -> None:
        """Forget the files of items that are recorded."""
        self._stored.clear()
        self._blob_keys.clear()

    def _send(self, file: File) -> None:
        """Put a file into the store; runs in a thread."""
        put_file(self._store, self._key(file), self._folder / file.path)

    def _key(self, file: File) -> str:
        """Return the store key of a file in the run's folder."""
        return (self._folder / file.path).relative_to(self._settings.data).as_posix()

    def _check_fence(self) -> None:
        """Check that no later attempt may have stored the same key. Raises StaleAttempt."""
        with self._database.writing() as session:
            queue.lock_active_attempt(session, self._run_id, self._attempt)
