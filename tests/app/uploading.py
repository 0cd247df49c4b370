"""A minimal uploader: a spool on disk, from which a test sends parts."""

import gzip
from pathlib import Path
from typing import Any

import httpx2
from starlette.testclient import TestClient

from db.access import accounts
from db.database import Database
from db.tables import User
from halfstep.telemetry.spool import SpoolWriter

ID = "0123456789abcdef" * 2


def make_description(**changes: Any) -> dict[str, Any]:
    """Return the run's description from run.json, in the format of an upload."""
    content: dict[str, Any] = {
        "id": ID,
        "attempt": 1,
        "name": "baseline",
        "project": "digits",
        "config": {"lr": 0.1, "scaler": "dynamic", "training": 7, "precision": ["16-mixed"]},
        "tags": ["fp16", "a,b"],
        "started": "2026-01-02T03:04:05.678+00:00",
        "host": "gpu-7",
        "versions": {"python": "3.12.1", "torch": "2.13.0"},
    }
    return content | changes


def write_token(database: Database, user: User) -> str:
    with database.writing() as session:
        return accounts.make_api_token(session, user, "uploader", "write")[0]


class Uploader:
    """An uploader of one run with a token, for one process after the other."""

    def __init__(self, client: TestClient | httpx2.Client, token: str, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.headers = {"Authorization": f"Bearer {token}"}
        self.run, self.attempt, self.sequence, self.offset = 0, 0, 0, 0

    def begin(self, **changes: Any) -> httpx2.Response:
        answer = self.post("", make_description(**changes))
        if answer.status_code == 200:
            self.run, self.attempt = answer.json()["run"], answer.json()["attempt"]
            self.sequence, self.offset = answer.json()["sequence"], answer.json()["offset"]
        return answer

    def spool(self, **options: Any) -> SpoolWriter:
        """The spool of the attempt that was begun."""
        return SpoolWriter(self.folder, self.attempt, **options)

    def content(self, sequence: int = 0) -> bytes:
        return (self.folder / f"{self.attempt}-{sequence}.spool").read_bytes()

    def put(
        self, piece: bytes, *, offset: int | None = None, packed: bool = False, **headers: str
    ) -> httpx2.Response:
        """Send a piece of the file that the server is receiving."""
        offset = self.offset if offset is None else offset
        if packed:
            piece, headers = gzip.compress(piece), {"Content-Encoding": "gzip"}
        answer = self.client.put(
            f"/api/v1/ingest/{self.run}/{self.attempt}/{self.sequence}",
            params={"offset": offset},
            content=piece,
            headers=self.headers | headers,
        )
        if answer.status_code == 200:
            self.offset = answer.json()["offset"]
        return answer

    def send(self, **options: Any) -> httpx2.Response:
        """Send the missing part of the current file."""
        return self.put(self.content(self.sequence)[self.offset :], **options)

    def put_file(
        self, path: str, piece: bytes, *, offset: int, size: int, sha256: str
    ) -> httpx2.Response:
        return self.client.put(
            f"/api/v1/ingest/{self.run}/{self.attempt}/files/{path}",
            params={"offset": offset, "size": size, "sha256": sha256},
            content=piece,
            headers=self.headers,
        )

    def end(
        self, status: str = "finished", step: int = 0, error: str | None = None, **more: Any
    ) -> Any:
        content = {"status": status, "step": step, "error": error, **more}
        return self.post(f"/{self.run}/{self.attempt}/end", content)

    def post(self, path: str, content: Any) -> httpx2.Response:
        return self.client.post(f"/api/v1/ingest{path}", json=content, headers=self.headers)
