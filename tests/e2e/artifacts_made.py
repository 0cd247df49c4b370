"""Shared helpers of the tests of artifacts."""

import base64
import hashlib

from db.database import Database
from db.files import artifacts
from db.settings import Settings
from db.tables import Run
from tests.spool_made import artifact_of

#: One red pixel.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


FILES = {"samples.txt": b"ROMEO: <b>What light?</b>", "grid.png": PICTURE}


def publish(
    settings: Settings, database: Database, run: Run, name: str, body: bytes, *, step: int = 100
) -> None:
    """Leave a file as a training does, and record it."""
    key = f"runs/{run.id}/artifacts/step-{step:08}/{name}"
    path = settings.data / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    sha256 = hashlib.sha256(body).hexdigest()
    event = {"step": step, "name": name, "size_bytes": len(body), "sha256": sha256}
    with database.writing() as session:
        artifacts.publish(session, run.id, run.attempt, artifact_of(event), key)
