"""Uploads while the bucket fails: nothing is lost, and no copy stays on the server's disk."""

import hashlib
from typing import Any

import pytest
from starlette.testclient import TestClient

from db.settings import Settings
from tests.buckets import Bucket

pytestmark = [pytest.mark.xdist_group("bucket"), pytest.mark.only_on("sqlite")]
CONTENT = bytes(range(256)) * 16
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def settings(settings: Settings, bucket: Bucket) -> Settings:
    return settings.model_copy(update={"storage_url": bucket.url})


def test_an_upload_continues_after_the_bucket_has_failed(
    settings: Settings, bucket: Bucket, script: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the bucket fails an upload waits in `incoming`, is continued, or expires in a day."""
    monkeypatch.setattr("app.files.file_uploads.RETRY_SECONDS", 0.1)
    files = [{"path": "a", "size_bytes": len(CONTENT), "sha256": SHA256}]
    version = script.post("/api/v1/artifacts", json={"name": "data", "files": files}).json()

    def put(offset: int, piece: bytes) -> Any:
        address = f"/api/v1/artifact-versions/{version['id']}/blobs/{SHA256}"
        return script.put(address, params={"offset": offset, "size": len(CONTENT)}, content=piece)

    def on_disk() -> list[str]:
        paths = (settings.data / "blobs").rglob("*")
        return [path.parent.name for path in paths if path.is_file() and path.suffix != ".lock"]

    bucket.proxy.is_broken = True
    for _attempt in range(2):
        assert put(0, CONTENT).status_code in (503, 409)
        assert on_disk() == ["incoming"]
    bucket.proxy.is_broken = False
    assert put(len(CONTENT), b"").json() == {"offset": len(CONTENT), "stored": True}
    assert on_disk() == []
    stored = script.get(f"/api/v1/artifact-versions/{version['id']}/files/a")
    assert stored.content == CONTENT
