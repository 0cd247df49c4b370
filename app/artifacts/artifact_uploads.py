"""Uploads of artifacts' files without a run, and deletion of content that no version has."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
from app.files.downloads import RETRY_SECONDS
from db.access import permissions
from db.access.permissions import Grants, Permission
from db.database import Database
from db.files import artifact_versions
from db.files.object_store import open_store
from db.files.storage import BLOBS, INCOMING
from db.queue import quotas
from db.runs.trash import DAY_SECONDS
from db.settings import Settings


class BlobUpload(NamedTuple):
    """A file of one version, with the grants of its sender."""

    grants: Grants
    version_id: int
    size_bytes: int
    sha256: str

    def part(self, settings: Settings) -> Path:
        """Return where its pieces are collected: other senders cannot continue them."""
        name = f"{self.version_id}-{self.grants.user_id}-{self.sha256}"
        return settings.data / BLOBS / INCOMING / name

    def is_stored(self, session: Session) -> bool:
        """Return whether it is stored. Raises NotFound, Forbidden, OverQuota."""
        project = self._check(session)
        is_stored = artifact_versions.is_stored(
            session, self.sha256, self.size_bytes, version_id=self.version_id
        )
        if not is_stored:
            quotas.check_storage(session, project, self.size_bytes)
        return is_stored

    def new_key(self) -> str:
        """Return the key to store it under."""
        return artifact_versions.new_key(self.sha256)

    def record(self, session: Session, key: str) -> str:
        """Record that it is stored under a key; return the key that its rows have.

        Raises NotFound, Forbidden, OverQuota.
        """
        project = self._check(session)
        quotas.lock_limits(session, project)
        key = artifact_versions.store_blob(
            session, self.sha256, self.size_bytes, key, version_id=self.version_id
        )
        quotas.check_storage(session, project, 0)  # which others may have filled meanwhile
        return key

    def _check(self, session: Session) -> str:
        """Check that the version exists and the sender may save; return its project."""
        permissions.limit(session, self.grants)
        _version, collection = artifact_versions.get(session, self.version_id)
        check_project(session, Permission.SUBMIT_RUN, collection.project)
        return collection.project


def tidy(settings: Settings, database: Database) -> None:
    """Delete content that no version has, and partial uploads that are a day old."""
    if not settings.storage_url and not (settings.data / BLOBS).exists():
        return
    store = open_store(settings, retry_seconds=RETRY_SECONDS)
    artifact_versions.collect_blobs(database, store)
    latest = time.time() - DAY_SECONDS
    for path in (settings.data / BLOBS / INCOMING).glob("*"):
        with suppress(OSError):  # deleted meanwhile
            if path.stat().st_mtime < latest:
                path.unlink()
