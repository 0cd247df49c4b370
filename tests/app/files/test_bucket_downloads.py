"""Downloads from a bucket: through the server, or by a presigned URL."""

import hashlib
from collections.abc import Iterator
from threading import Event
from typing import Any

import httpx2
import obstore
import pytest

from app.files.damage_check_job import DamageCheckJob
from db.database import Database
from db.files import artifacts, checkpoints
from db.files.object_store import delete_files, open_store, put_file
from db.files.storage import mismatches
from db.settings import Settings
from db.tables import Run
from halfstep import Client
from halfstep.protocol import DAMAGED
from tests.app.artifacts.test_artifacts import save
from tests.app.conftest import serving
from tests.buckets import Bucket
from tests.pictures import picture
from tests.spool_made import artifact_of, checkpoint_of

pytestmark = [pytest.mark.xdist_group("bucket"), pytest.mark.only_on("sqlite")]
BODY = bytes(range(256)) * 5 * 4096 + b"end"  # some chunks
SHA256 = hashlib.sha256(BODY).hexdigest()
PATH, ARTIFACT = "/runs/1/checkpoints/1/download", "/runs/1/artifacts/1/download"
PART = {"Range": "bytes=1000000-3000000"}


@pytest.fixture
def settings(settings: Settings, bucket: Bucket, request: pytest.FixtureRequest) -> Settings:
    is_signed = request.cls is TestSigned
    changes = {"storage_url": bucket.url, "presigned_downloads": is_signed}
    return settings.model_copy(update=changes)


@pytest.fixture
def http(settings: Settings, database: Database, running: Run, token: str) -> Iterator[Any]:
    """A client of a server with a run that has a checkpoint and an artifact in the bucket."""
    result = {"size_bytes": len(BODY), "sha256": SHA256}
    store, folder = open_store(settings), f"runs/{running.id}"
    path = settings.data / "a.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(BODY)
    keys = [f"{folder}/checkpoints/step-00000400.pt", f"{folder}/artifacts/step-00000400/a.txt"]
    for key in keys:
        put_file(store, key, path)
    saved = {"step": 400, "reason": "end", "files": [{"kind": "checkpoint", "path": "", **result}]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, 1, checkpoint_of(saved), keys[:1])
        artifacts.publish(
            session, running.id, 1, artifact_of({"step": 400, "name": "a.txt", **result}), keys[1]
        )
    headers = {"Authorization": f"Bearer {token}"}
    with (
        serving(settings, database) as (_server, address),
        httpx2.Client(base_url=address, headers=headers) as client,
    ):
        yield client


def count_requests(bucket: Bucket) -> dict[str, int]:
    """Return the bucket's requests for files, without the server's listings of uploads."""
    return {name: count for name, count in bucket.proxy.requests.items() if name != "list"}


def test_a_download_is_one_request_to_the_bucket(http: httpx2.Client, bucket: Bucket) -> None:
    """Whole files and parts of any size take one request; a response without content needs none."""
    for headers, status, first, last in (
        ({}, 200, 0, len(BODY)),
        (PART, 206, 1000000, 3000001),
        (PART | {"If-Range": f'"{SHA256}"'}, 206, 1000000, 3000001),
        (PART | {"If-Range": '"another"'}, 200, 0, len(BODY)),
    ):
        bucket.proxy.requests.clear()
        answer = http.get(PATH, headers=headers)
        assert (answer.status_code, answer.content) == (status, BODY[first:last])
        assert answer.headers["etag"] == f'"{SHA256}"'
        assert count_requests(bucket) == {"GET": 1}
    bucket.proxy.requests.clear()
    assert http.get(PATH, headers={"If-None-Match": f'"{SHA256}"'}).status_code == 304
    assert http.get(PATH, headers={"Range": "bytes=99999999-"}).status_code == 416
    assert count_requests(bucket) == {}
    answer = http.head(PATH)
    assert answer.headers["content-length"] == str(len(BODY))
    assert count_requests(bucket) == {"HEAD": 1}


def test_missing_or_truncated_objects_are_not_sent(
    http: httpx2.Client, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a missing or truncated object is sent; if the bucket is unavailable, the error
    does not have its URL.
    """
    monkeypatch.setattr("app.files.downloads.RETRY_SECONDS", 0.1)
    key = "lab/runs/1/checkpoints/step-00000400.pt"
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=BODY[:10])
    for headers in ({}, PART, {"Range": "bytes=0-4"}):
        answer = http.get(PATH, headers=headers)
        assert (answer.status_code, "has 10 bytes" in answer.text) == (404, True)
    bucket.client.delete_object(Bucket=bucket.name, Key=key)
    assert "no longer in the store" in http.get(PATH).text
    bucket.proxy.is_broken = True
    answer = http.get(PATH)
    assert (answer.status_code, bucket.name in answer.text) == (503, False)


class TestSigned:
    """Downloads with HALFSTEP_PRESIGNED_DOWNLOADS."""

    def test_the_url_opens_the_file_for_its_bearer(
        self, http: httpx2.Client, bucket: Bucket
    ) -> None:
        """The presigned URL is valid for minutes and returned after the permission check; artifacts
        on pages are served by the server.
        """
        assert httpx2.get(f"{http.base_url}{PATH}").status_code in (303, 401)
        answer = http.get(PATH)
        assert (answer.status_code, answer.content) == (307, b"")
        address = answer.headers["location"]
        assert address.startswith(f"{bucket.proxy.address}/{bucket.name}/lab/runs/1/")
        assert "X-Amz-Expires=300" in address
        assert httpx2.get(address).content == BODY
        part = httpx2.get(address, headers=PART)
        assert (part.status_code, part.content) == (206, BODY[1000000:3000001])
        for status, headers in ((304, {"If-None-Match": f'"{SHA256}"'}), (206, PART)):
            headers |= {"If-Range": f'"{SHA256}"'}
            assert http.get(PATH, headers=headers).status_code == status
        assert http.head(PATH).headers["content-length"] == str(len(BODY))
        assert http.get(ARTIFACT).content == BODY

    def test_images_of_a_note_are_sent_by_the_server(self, http: httpx2.Client) -> None:
        """Images of a note are sent by the server: the content security policy allows no other
        host.
        """
        image = http.post("/api/v1/projects/images", content=picture()).json()
        answer = http.get(image["address"])
        assert (answer.status_code, answer.content) == (200, picture())

    def test_the_client_follows_without_its_token(
        self, http: httpx2.Client, bucket: Bucket, token: str, tmp_path: Any
    ) -> None:
        """A presigned URL is followed without the token, names the file, and resumes a download."""
        (tmp_path / f".{SHA256}.partial").write_bytes(BODY[:5000])
        bucket.proxy.headers.clear()
        with Client(str(http.base_url), token) as client:
            path = client.download(1, tmp_path)
        assert (path.name, path.read_bytes()) == ("digits-fp16-run1-step400.pt", BODY)
        assert bucket.proxy.headers
        assert token not in str(bucket.proxy.headers)


def test_files_that_are_missing_in_the_bucket_are_named(
    settings: Settings, database: Database, http: httpx2.Client
) -> None:
    """Files missing in the bucket are named by the run's damage, a version's page and each
    download, and the run is marked.
    """
    version = save(http)
    address = f"/api/v1/artifact-versions/{version['id']}"
    assert DAMAGED not in http.get(address).headers
    store = open_store(settings)
    keys = [meta["path"] for page in obstore.list(store) for meta in page]
    delete_files(store, keys)
    damage = http.get("/api/v1/damage?runs=1").json()
    assert {part["kind"] for part in damage["damage"]} == {"checkpoint", "artifact"}
    assert "step-00000400.pt): the file is missing" in damage["text"]
    DamageCheckJob(settings, database, Event()).check_due()
    listed = http.get("/api/v1/runs").json()["runs"][0]
    assert listed["damage"] == "Missing or damaged in run 1: 2 files."
    assert http.get(address).headers[DAMAGED].endswith("missing on the server: a.csv.")
    with database.reading() as session:
        problems = {each.key: each.problem for each in mismatches(session, store)}
    assert problems.keys() == {*keys}
    assert "the file is missing (digits:v0/a.csv)" in problems.values()
    for path in (PATH, ARTIFACT, f"{address}/files/a.csv"):
        lost = http.get(path)
        assert (lost.status_code, "is no longer in the store" in lost.text) == (404, True)


def test_a_bucket_that_does_not_answer_marks_no_run(
    settings: Settings,
    database: Database,
    http: httpx2.Client,
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the bucket does not answer, no run is marked as damaged, and the check is repeated
    later.
    """
    bucket.proxy.is_broken = True
    DamageCheckJob(settings, database, Event()).check_due()
    bucket.proxy.is_broken = False
    assert "files of run 1 cannot be checked" in caplog.text
    assert http.get("/api/v1/runs").json()["runs"][0]["damage"] == ""
