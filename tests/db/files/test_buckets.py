"""Files in buckets, of moto and of a successor of MinIO."""

import hashlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import obstore
import pytest
from sqlalchemy import insert

from db.database import Database
from db.errors import Invalid
from db.files import artifacts
from db.files.erasure import erase
from db.files.object_store import (
    PART_BYTES,
    check_store,
    delete_file,
    get_file,
    open_store,
    put_file,
)
from db.files.storage import mend, mismatches
from db.queue import queue
from db.runs import trash
from db.settings import Settings
from db.tables import Artifact, Run, Status, User
from tests.buckets import Bucket
from tests.db.runs.trash_made import move_to_trash
from tests.site import until

pytestmark = pytest.mark.xdist_group("bucket")
KEY = "runs/1/checkpoints/step-00000010.pt"
PARTS = 5
PUT = "from db.files.object_store import open_store, put_file\nfrom db.settings import Settings\n"
PUT += "from pathlib import Path\nimport sys\n"
PUT += "put_file(open_store(Settings.read()), sys.argv[1], Path(sys.argv[2]))"


@pytest.fixture
def settings(bucket: Bucket, tmp_path: Path) -> Settings:
    return Settings(data=tmp_path / "data", storage_url=bucket.url)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several parts and a byte, all of them different."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    with path.open("wb") as file:
        for number in range(PARTS):
            file.write(bytes([number]) * PART_BYTES)
        file.write(b"!")
    return path


@pytest.fixture(scope="module")
def sha256(large: Path) -> str:
    with large.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_a_large_file_goes_in_parts_and_comes_back_by_one_request_without_conditions(
    bucket: Bucket, settings: Settings, large: Path, sha256: str, tmp_path: Path
) -> None:
    """A multipart upload's object exists once it is complete, and one plain request reads it
    back.
    """
    store = open_store(settings)
    put_file(store, KEY, large)
    assert bucket.proxy.requests["part"] == PARTS + 1
    bucket.proxy.requests.clear()
    get_file(store, KEY, tmp_path / "copy.pt", sha256=sha256)
    assert bucket.proxy.requests == {"GET": 1}
    assert bucket.keys() == [KEY]
    # No conditional requests: a server that ignores the condition would silently write anyway.
    asked = {name.lower() for headers in bucket.proxy.headers for name in headers}
    assert not {name for name in asked if name.startswith("if-")}


def test_remains_of_a_killed_upload_do_no_harm(
    bucket: Bucket, settings: Settings, large: Path, sha256: str, tmp_path: Path
) -> None:
    """An unfinished upload is no file, and the next one is complete and leaves nothing."""
    bucket.proxy.most_parts = 3
    words = [sys.executable, "-c", PUT, KEY, str(large)]
    with subprocess.Popen(words) as uploading:
        until(lambda: sum(bucket.count_unfinished(KEY)) == 3)
        uploading.kill()
    store = open_store(settings)
    with pytest.raises(FileNotFoundError):
        obstore.head(store, KEY)
    bucket.proxy.release()
    put_file(store, KEY, large)
    get_file(store, KEY, tmp_path / "copy.pt", sha256=sha256)
    # obstore offers no way to them: a rule of the bucket's deletes them
    # (docs/how-to/operations.md).
    assert len(bucket.count_unfinished(KEY)) == 1


def test_a_server_that_fails_for_a_while_is_tried_again(
    bucket: Bucket, settings: Settings, large: Path, sha256: str, tmp_path: Path
) -> None:
    """An upload continues with a failed part; if it fails for good, its parts are deleted."""
    bucket.proxy.most_parts = 3
    failed: list[Exception] = []

    def put(retry_seconds: float) -> None:
        try:
            put_file(open_store(settings, retry_seconds=retry_seconds), KEY, large)
        except obstore.exceptions.BaseError as error:
            failed.append(error)

    uploading = threading.Thread(target=put, args=(300.0,))
    uploading.start()
    until(lambda: bucket.proxy.requests["part"] > 3)
    bucket.proxy.is_broken = True
    bucket.proxy.release()
    until(lambda: bucket.proxy.requests["part"] > 12)
    bucket.proxy.is_broken = False
    uploading.join()
    assert failed == []
    get_file(open_store(settings), KEY, tmp_path / "copy.pt", sha256=sha256)
    assert bucket.count_unfinished(KEY) == []


def test_a_bucket_that_is_gone_has_not_lost_its_files(
    settings: Settings, bucket: Bucket, large: Path, tmp_path: Path
) -> None:
    """A missing bucket is retried like an unreachable one, so that a run keeps its checkpoint."""
    store = open_store(settings)
    with pytest.raises(FileNotFoundError):
        get_file(store, KEY, tmp_path / "copy.pt", sha256="")
    bucket.client.delete_bucket(Bucket=bucket.name)
    for path in (large, Path(__file__)):
        with pytest.raises(obstore.exceptions.BaseError, match="NoSuchBucket"):
            put_file(store, KEY, path)
    with pytest.raises(obstore.exceptions.BaseError, match="NoSuchBucket"):
        get_file(store, KEY, tmp_path / "copy.pt", sha256="")


def test_files_are_deleted_each_by_a_request(
    bucket: Bucket, settings: Settings, database: Database, running: Run, ada: User
) -> None:
    """Each deletion is one request, also of a missing file; an erased run loses its own files
    only.
    """
    store = open_store(settings)
    numbers = range(25)
    for number in numbers:
        obstore.put(store, f"runs/{running.id}/artifacts/step-00000001/{number}.txt", b"x")
    other = f"runs/{running.id}0/artifacts/step-00000001/a.txt"
    for key in (KEY, other):
        obstore.put(store, key, b"x")
    for _again in range(2):
        delete_file(store, KEY)
    with database.writing() as session:
        queue.end(session, running.id, 1, Status.FINISHED)
    move_to_trash(database, ada, running.id)
    with database.writing() as session:
        trash.erase(session, running.id, ada)
    bucket.proxy.requests.clear()
    erase(database, settings, store, running.id, Event())
    assert bucket.keys() == [other]
    # Its files, and those of its frozen steps.
    assert bucket.proxy.requests == {"list": 2, "DELETE": len(numbers)}


@pytest.mark.extended
@pytest.mark.only_on("postgresql")
def test_what_does_not_match_is_found_by_pages(
    bucket: Bucket, settings: Settings, database: Database, running: Run
) -> None:
    """Lost, truncated and unknown files among 2,000 are found by listing, not by single
    requests.
    """
    store = open_store(settings)
    names = [f"{number:04}.txt" for number in range(2000)]
    keys = [f"runs/{running.id}/artifacts/step-00000001/{name}" for name in names]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: obstore.put(store, key, b"x"), keys))
    same = {"run_id": running.id, "step": 1, "size_bytes": 1, "sha256": "0" * 64}
    with database.writing() as session:
        rows = [{"name": name, "key": key} for name, key in zip(names, keys, strict=True)]
        session.execute(insert(Artifact), [same | row for row in rows])
        queue.end(session, running.id, 1, Status.FINISHED)
    stranger = f"runs/{running.id}/artifacts/step-00000001/stranger"
    obstore.put(store, stranger, b"x")
    obstore.put(store, keys[1], b"xx")
    delete_file(store, keys[0])
    bucket.proxy.requests.clear()
    with database.reading() as session:
        found = mismatches(session, store)
    assert set(bucket.proxy.requests) == {"list"}
    assert bucket.proxy.requests["list"] <= 5
    problems = {each.key: each.problem for each in found}
    assert problems == {
        keys[0]: "the file is missing",
        keys[1]: "the file has 2 bytes, not the recorded 1",
        stranger: "no row names the file",
    }
    mend(database, store, found)
    with database.reading() as session:
        assert mismatches(session, store) == []
        assert artifacts.count(session, running.id) == len(keys) - 2


def test_a_bucket_without_access_is_named_at_the_start(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start an unusable bucket is an error with the setting and the bucket's message."""
    monkeypatch.setattr("db.files.object_store.CHECK_SECONDS", 0.1)
    check_store(Settings(data=tmp_path, storage_url=bucket.url))
    begins = "HALFSTEP_STORAGE_URL: the bucket cannot be listed: "
    with pytest.raises(Invalid, match=f"{begins}NoSuchBucket: The specified bucket[^\n]*$"):
        check_store(Settings(data=tmp_path, storage_url="s3://nobody-has-made-it/x"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Invalid, match=f"{begins}.*http://127.0.0.1:9/[^\n]*$"):
        check_store(Settings(data=tmp_path, storage_url=bucket.url))
