"""Uploaded weights are stored whole by their hash or not at all, and deleted once unused."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_connection
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from app.files import weight_uploads
from app.files.weight_uploads_api import PIECE_BYTES
from db.database import Database
from db.queue import run_control
from db.runs import runs, trash
from db.settings import Settings
from db.tables import User
from tests.app.conftest import CONFIG, submit
from tests.app.files.weight_uploads_api_made import offer_weights
from tests.site import halfstep, until

#: Two pieces and a byte, that begin as torch's files do.
BODY = (b"PK\x03\x04" + bytes(range(256)) * (PIECE_BYTES // 128))[: 2 * PIECE_BYTES + 1]
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def allowing(app: FastAPI, settings: Settings) -> Any:
    """Limit the size of files that this process may write."""

    def allow(most: int) -> None:
        app.state.settings = settings.model_copy(update={"upload_gib": most / 2**30})

    return allow


def files(folder: Path) -> list[str]:
    here = folder.rglob("*")
    return sorted(each.relative_to(folder).as_posix() for each in here if each.is_file())


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_file_is_stored_by_its_hash_and_starts_a_run(
    app: FastAPI,
    settings: Settings,
    database: Database,
    browser: TestClient,
    script: TestClient,
    place: str,
    tmp_path: Path,
) -> None:
    """Uploaded weights are stored like checkpoints, once for several requests."""
    folder = settings.data
    if place == "bucket":
        folder = tmp_path / "bucket"
        folder.mkdir()
        app.state.settings = settings.model_copy(update={"storage_url": folder.as_uri()})
    for client in (browser, script):
        answer = client.put("/api/v1/uploads/my net (1).pt", content=BODY)
        assert answer.status_code == 201, answer.text
    stored = answer.json()
    name = f"{SHA256}/my-net-1-.pt"
    assert stored == {"upload": name, "size_bytes": len(BODY), "sha256": SHA256}
    assert files(folder / "uploads") == [name]
    assert (folder / "uploads" / name).read_bytes() == BODY
    assert place == "folder" or files(settings.data / "uploads") == []
    offer_weights(database)
    for upload, status in ((name, 201), ("../net.pt", 422), (f"{SHA256}/.pt", 422)):
        config = {"weights": {"upload": upload}}
        answer = script.post("/api/v1/runs", json={"recipe": "digits", "config": config})
        assert answer.status_code == status, answer.text
    assert "weights.upload" in answer.json()["errors"]
    page = browser.get("/runs/new?from=1").text
    assert f'name="weights.upload" value="{name}"' in page
    assert 'data-upload="17179869184"' in page


@pytest.mark.parametrize(
    ("name", "body", "most", "status", "message"),
    [
        (
            "net.bin",
            BODY,
            None,
            422,
            "'net.bin' is not a weights file; allowed: .safetensors or .pt",
        ),
        ("net.pt", b"", None, 422, "net.pt is empty"),
        ("net.pt", b"{" * 99, None, 422, "net.pt does not have the format of torch.save"),
        ("n.safetensors", b"x" * 99, None, 422, "does not have the format of safetensors"),
        ("..%2Fnet.pt", BODY, None, 422, "'../net.pt' contains a folder"),
        ("net.pt", BODY, len(BODY) - 1, 413, "net.pt is too large; allowed by HALFSTEP_UPLOAD_GIB"),
        ("net.pt", [BODY[:-1], b"x"], len(BODY) - 1, 413, "allowed by HALFSTEP_UPLOAD_GIB"),
        ("net.pt", b"x", 0, 413, "allowed by HALFSTEP_UPLOAD_GIB: none"),
    ],
    ids=["kind", "empty", "torch", "safetensors", "folder", "size", "on the way", "off"],
)
def test_rejected_uploads_leave_nothing(
    settings: Settings,
    allowing: Any,
    script: TestClient,
    name: str,
    body: bytes | list[bytes],
    most: int | None,
    status: int,
    message: str,
) -> None:
    """An upload that declares too large a size is rejected at once, otherwise while it is
    received.
    """
    if most is not None:
        allowing(most)
    content = iter(body) if isinstance(body, list) else body
    answer = script.put(f"/api/v1/uploads/{name}", content=content)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text
    assert files(settings.data / "uploads") == []


def test_a_half_upload_leaves_nothing(settings: Settings, address: str, script: TestClient) -> None:
    """The received part of an interrupted upload is deleted."""
    place, folder = urlsplit(address), settings.data / "uploads"
    lines = (
        "PUT /api/v1/uploads/net.pt HTTP/1.1",
        f"Host: localhost:{place.port}",
        f"Authorization: {script.headers['authorization']}",
        f"Content-Length: {len(BODY)}",
    )
    with create_connection((str(place.hostname), place.port or 0)) as line:
        line.sendall("\r\n".join((*lines, "", "")).encode() + BODY[: PIECE_BYTES + 100])
        until(lambda: len(files(folder)) == 1)
    until(lambda: not files(folder))


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_what_no_run_starts_from_goes_after_a_day(
    app: FastAPI,
    settings: Settings,
    database: Database,
    ada: User,
    script: TestClient,
    place: str,
    tmp_path: Path,
) -> None:
    """Uploads that no run uses are deleted after a day, as are partial ones; runs in the trash keep
    theirs, erased runs do not.
    """
    half = settings.data / "uploads" / "incoming" / "half"  # of a server that was killed
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x")
    folder = settings.data / "uploads"
    if place == "bucket":
        folder = tmp_path / "bucket" / "uploads"
        folder.mkdir(parents=True)
        settings = settings.model_copy(update={"storage_url": folder.parent.as_uri()})
        app.state.settings = settings

    def upload(name: str) -> str:
        return str(script.put(f"/api/v1/uploads/{name}", content=BODY).json()["upload"])

    used, unused = upload("used.pt"), upload("unused.pt")
    run = submit(database, ada, config=CONFIG | {"weights": {"upload": used}})
    plain = submit(database, ada, config=CONFIG | {"weights": {"upload": None}})
    weight_uploads.tidy(settings, database)
    assert {used, unused} <= set(files(folder))
    yesterday = time.time() - 86_500
    for path in (half, folder / used, folder / unused):
        os.utime(path, (yesterday, yesterday))
    young = upload("young.pt")
    weight_uploads.tidy(settings, database)
    assert files(folder) == sorted([used, young])
    assert not half.exists()
    with database.writing() as session:
        for each in (run, plain):
            run_control.cancel(session, each.id, ada)
            trash.delete(session, each.id, ada)
    weight_uploads.tidy(settings, database)
    assert used in files(folder)
    with database.writing() as session:
        trash.erase(session, run.id, ada)
    weight_uploads.tidy(settings, database)
    assert files(folder) == [young]


@pytest.mark.slow
def test_the_command_uploads_initial_weights(
    database: Database, address: str, script: TestClient, tmp_path: Path
) -> None:
    """`submit --weights FILE` uploads the file; a missing one is rejected before the upload."""
    offer_weights(database)
    token = script.headers["authorization"].removeprefix("Bearer ")
    environment = {"HALFSTEP_URL": address, "HALFSTEP_TOKEN": token}
    (tmp_path / "net.pt").write_bytes(BODY)
    words = ("--weights", str(tmp_path / "net.pt"), "--set", "weights.strict=false")
    queued = halfstep("run", "submit", "digits", *words, "--json", **environment)
    assert queued.returncode == 0, queued.stderr
    with database.reading() as session:
        weights = runs.get(session, json.loads(queued.stdout)["id"]).config["weights"]
    assert weights["upload"] == f"{SHA256}/net.pt"
    assert weights["strict"] is False
    for wrong in (("digits", "--weights", str(tmp_path)), ("--command", "ls", *words[:2])):
        refused = halfstep("run", "submit", *wrong, **environment)
        assert "allowed: a file, and only with a recipe" in refused.stderr


def test_only_users_can_check_for_an_upload(
    settings: Settings, script: TestClient, stranger: TestClient, browser: TestClient
) -> None:
    """A check for an upload extends its life by a day and requires authentication."""
    upload = script.put("/api/v1/uploads/net.pt", content=BODY).json()["upload"]
    path = settings.data / "uploads" / upload
    weights = {"weights": {"upload": upload}}
    sweep = {"kind": "grid", "space": {"lr": [1]}, "metric": "loss", "goal": "minimise"}
    form = {"recipe": "digits", "weights.upload": upload}

    def is_kept_by(send: Callable[[], Any]) -> bool:
        os.utime(path, (0, 0))
        answer = send()
        assert answer.status_code in (303, 401, 403, 404, 422), answer.text
        return path.stat().st_mtime > 0

    def runs_of(client: TestClient, **headers: str) -> list[Callable[[], Any]]:
        run, swept = {"recipe": "digits", "config": weights}, {"recipe": "digits"} | sweep
        swept |= {"name": "s", "config": weights, "runs": 1}
        return [
            lambda: client.post("/api/v1/runs", json=run, headers=headers),
            lambda: client.post("/api/v1/sweeps", json=swept, headers=headers),
            lambda: client.post("/runs", data=form, headers=headers),
        ]

    strangers = [*runs_of(stranger), *runs_of(stranger, authorization="Bearer nobody")]
    assert [is_kept_by(send) for send in strangers] == [False] * 6
    by_script, _sweep, _form = runs_of(script)
    *_others, by_form = runs_of(browser)
    assert [is_kept_by(send) for send in (by_script, by_form)] == [True, True]


@pytest.fixture
def small_disk(settings: Settings) -> Iterator[Path]:
    """A data folder on a file system of 256 KiB."""
    settings.data.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(settings.data)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield settings.data
    subprocess.run(["umount", "--lazy", str(settings.data)], check=True)


def test_an_upload_that_meets_a_full_disk_says_so(small_disk: Path, script: TestClient) -> None:
    """An upload of weights to a full disk gets the needed and free bytes, and leaves no file."""
    answer = script.put("/api/v1/uploads/net.pt", content=BODY)
    assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
    assert f"{len(BODY):,} bytes are needed" in answer.json()["detail"]
    assert files(small_disk) == []
