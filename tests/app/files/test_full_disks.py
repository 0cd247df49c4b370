"""Full disks: while watched runs send files, and under a SQLite database."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from db.access import accounts
from db.database import Database
from db.settings import Settings
from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.upload import TRIES, upload
from tests.app.conftest import serving
from tests.app.uploading import Uploader, write_token
from tests.db.telemetry.telemetry_made import make_steps
from tests.halfstep.telemetry.uploader_made import Writer
from tests.spool_made import event_of

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PICTURE = "artifacts/step-00000003/x.png"
PIECE = 64 * 1024


class Disk:
    """A file system of its own."""

    def __init__(self, folder: Path, size: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def grow(self, size: str) -> None:
        """Free the space again."""
        self._mount("-o", f"remount,size={size}")

    def fill(self) -> None:
        """Fill the file system completely."""
        with (self.folder / "filler").open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def _mount(self, *words: str) -> None:
        command = ["mount", *words, str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")


@pytest.fixture
def small(settings: Settings) -> Iterator[Disk]:
    """A data folder on a file system of 256 KiB."""
    disk = Disk(settings.data, "256k")
    yield disk
    disk.unmount()


@pytest.fixture
def uploader(stranger: TestClient, database: Database, tmp_path: Path) -> Uploader:
    with database.writing() as session:
        ada = accounts.user_named(session, "ada")
    return Uploader(stranger, write_token(database, ada), tmp_path / "spool")


def put_from(uploader: Uploader, offset: int) -> tuple[int, int]:
    """Send pieces of the picture until one is refused; return the status and the offset."""
    size = len(CONTENT)
    while True:
        piece = CONTENT[offset : offset + PIECE]
        answer = uploader.put_file(PICTURE, piece, offset=offset, size=size, sha256=SHA256)
        said = answer.json()
        if answer.status_code == 409:  # a part of a piece had room
            offset = said["offset"]
        elif answer.status_code != 200:
            assert said["code"] == "storage_full", said
            assert f"{size - offset:,} bytes are needed" in said["detail"]
            return answer.status_code, offset
        elif said["stored"]:
            return 200, size
        else:
            offset = said["offset"]


@pytest.mark.slow
def test_a_file_continues_after_a_full_disk(
    small: Disk, uploader: Uploader, script: TestClient
) -> None:
    """An upload to a full disk gets 507 with the needed and free bytes, and continues later."""
    uploader.begin()
    file = {"path": PICTURE, "size_bytes": len(CONTENT), "sha256": SHA256}
    with uploader.spool() as spool:
        spool.steps(make_steps([1.0] * 3))
        spool.event(event_of({"event": "artifact", "step": 3, "name": "x.png", **file}))
    uploader.send()
    status, offset = put_from(uploader, 0)
    assert status == 507
    assert 0 < offset <= 256 * 1024
    assert put_from(uploader, offset)[0] == 507
    small.grow("8m")
    assert put_from(uploader, offset) == (200, len(CONTENT))
    [artifact] = script.get("/api/v1/runs/1/artifacts").json()["artifacts"]
    assert script.get(f"/runs/1/artifacts/{artifact['id']}/download").content == CONTENT


@pytest.mark.slow
def test_an_upload_names_a_full_disk_of_the_server_and_continues_later(
    small: Disk, settings: Settings, database: Database, tmp_path: Path
) -> None:
    """`halfstep upload` retries while the server's disk is full, and then sends the rest."""
    writer = Writer(tmp_path / "runs").steps(1).file(CONTENT).finish()
    with database.writing() as session:
        ada = accounts.user_named(session, "ada")
    token, waited = write_token(database, ada), list[float]()
    with serving(settings, database) as (_server, address):
        with (
            Ingest(Credentials(address, token)) as ingest,
            pytest.raises(ApiError, match="The disk that stores files is full"),
        ):
            upload(writer.files.folder, ingest, print, waited.append)
        assert len(waited) == TRIES - 1
        small.grow("8m")
        with Ingest(Credentials(address, token)) as ingest:
            upload(writer.files.folder, ingest, print, waited.append)
    assert [path.read_bytes() for path in small.folder.glob("runs/1/artifacts/*")] == [CONTENT]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Disk, TestClient, Uploader]]:
    """A server with its SQLite database on a small file system, and an uploader."""
    disk = Disk(tmp_path / "small", "8m")
    settings = Settings(data=tmp_path / "data", database_url=f"sqlite:///{disk.folder}/halfstep.db")
    database = Database(settings.database_url)
    try:
        database.migrate()
        with database.writing() as session:
            ada = accounts.user_named(session, "ada")
            ada.is_admin = True
            token = accounts.make_api_token(session, ada, "script")[0]
        with TestClient(create_app(settings, database), base_url="http://localhost") as client:
            client.headers["authorization"] = f"Bearer {token}"
            yield disk, client, Uploader(client, write_token(database, ada), tmp_path / "spool")
    finally:
        database.dispose()
        disk.unmount()


@pytest.mark.slow
@pytest.mark.only_on("sqlite")
def test_a_full_disk_is_reported_and_changes_nothing(
    database_url: str, full: tuple[Disk, TestClient, Uploader]
) -> None:
    """With a full disk changes and uploads get 507, pages load, and uploads continue later."""
    disk, client, uploader = full
    uploader.begin()
    with uploader.spool() as spool:
        for first in range(1, 5000, 100):
            spool.steps(make_steps([1.0] * 100, first=first))
    disk.fill()
    note = {"note": "n" * 20_000}
    for answer in (uploader.send(), client.patch("/api/v1/runs/1", json=note)):
        assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
        assert "disk of the database is full" in answer.json()["detail"]
    run = client.get("/api/v1/runs/1").json()
    assert (run["status"], run["step"]) == ("running", 0)
    disk.grow("32m")
    assert uploader.send().json()["offset"] == len(uploader.content())
    assert client.patch("/api/v1/runs/1", json=note).status_code == 200
    assert client.get("/api/v1/runs/1").json()["step"] == 5000
