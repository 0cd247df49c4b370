"""Checkpoint downloads: whole, in part, and refused."""

import hashlib
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.files.downloads import CHUNK_BYTES, parse_range
from app.main import create_app
from db.access import accounts
from db.database import Database
from db.files import checkpoints
from db.settings import Settings
from db.tables import Run, User
from tests.e2e.test_artifacts import publish
from tests.marks import looped
from tests.spool_made import checkpoint_of

BODY = bytes(range(256)) * 8192  # two chunks
SHA256 = hashlib.sha256(BODY).hexdigest()
PATH = "/runs/1/checkpoints/1/download"


@pytest.fixture
def saved(settings: Settings, database: Database, running: Run) -> None:
    """A checkpoint of the running run."""
    assert len(BODY) == 2 * CHUNK_BYTES
    path = settings.run_folder(running.id) / "checkpoints" / "step-00000400.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(BODY)
    file = {"kind": "checkpoint", "path": "", "size_bytes": len(BODY), "sha256": SHA256}
    event: dict[str, Any] = {"step": 400, "reason": "end", "request": None, "files": [file]}
    with database.writing() as session:
        key = path.relative_to(settings.data).as_posix()
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), [key])


def test_whole_file_has_its_name_length_and_etag(saved: None, script: TestClient) -> None:
    """A checkpoint's file arrives whole, and its name has the run and the step."""
    answer = script.get(PATH)
    assert answer.status_code == 200
    assert answer.content == BODY
    headers = answer.headers
    assert headers["content-length"] == str(len(BODY))
    assert headers["etag"] == f'"{SHA256}"'
    assert headers["accept-ranges"] == "bytes"
    assert headers["content-disposition"].endswith('filename="digits-fp16-run1-step400.pt"')


def test_an_invalid_token_gets_401_instead_of_the_sign_in_page(
    saved: None, stranger: TestClient
) -> None:
    """A script gets 401, never a sign-in page that it would take for the file."""
    answer = stranger.get(PATH, headers={"Authorization": "Bearer hs_wrong"})
    assert (answer.status_code, answer.json()["code"]) == (401, "sign_in_needed")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert stranger.get(PATH).status_code == 303


def test_an_empty_file_is_sent_empty(
    settings: Settings, database: Database, running: Run, script: TestClient
) -> None:
    """An empty file is sent with an empty body, also if a preview requests its beginning."""
    publish(settings, database, running, "empty.txt", b"")
    answer = script.get("/runs/1/artifacts/1/download", headers={"Range": "bytes=0-4095"})
    assert (answer.status_code, answer.content) == (200, b"")


def test_head_has_only_the_headers(saved: None, script: TestClient) -> None:
    """HEAD has length and ETag without content."""
    answer = script.head(PATH)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(BODY))


@looped(
    "header, first, last",
    [
        ("bytes=0-9", 0, 9),
        ("bytes=1000000-1100000", 1_000_000, 1_100_000),
        ("bytes=2097000-", 2_097_000, len(BODY) - 1),
        ("bytes=-5", len(BODY) - 5, len(BODY) - 1),
        ("bytes=2097151-9999999", len(BODY) - 1, len(BODY) - 1),
        (f"bytes=9-{'9' * 4301}", 9, len(BODY) - 1),
        (f"bytes={'0' * 4301}9-10", 9, 10),
        (f"bytes=-{'9' * 4301}", 0, len(BODY) - 1),
    ],
)
def test_range_gets_its_part(
    saved: None, script: TestClient, header: str, first: int, last: int
) -> None:
    """A range is sent with 206 and its position in the file, also across chunks."""
    answer = script.get(PATH, headers={"Range": header})
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(BODY)}"
    assert answer.content == BODY[first : last + 1]


def test_range_beyond_the_end_is_rejected(saved: None, script: TestClient) -> None:
    """A range beyond the end gets 416 with the length of the file."""
    for start in (len(BODY), "9" * 4301):
        answer = script.get(PATH, headers={"Range": f"bytes={start}-"})
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{len(BODY)}"


@looped("header", ["bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=-", ""])
def test_ranges_that_make_no_sense_get_the_whole(header: str) -> None:
    """Anything but a single range of bytes is ignored, as RFC 9110 permits."""
    assert parse_range(header, 100) is None


def test_a_broken_download_resumes_only_if_the_file_is_the_same(
    saved: None, script: TestClient
) -> None:
    """A broken download continues by If-Range with the same ETag, and else restarts."""
    headers = {"Range": "bytes=100-", "If-Range": f'"{SHA256}"'}
    assert script.get(PATH, headers=headers).status_code == 206
    headers["If-Range"] = '"another"'
    assert script.get(PATH, headers=headers).content == BODY


def test_who_has_the_file_need_not_fetch_it(saved: None, script: TestClient) -> None:
    """A request with If-None-Match and the file's ETag is answered by 304."""
    answer = script.get(PATH, headers={"If-None-Match": f'"x", "{SHA256}"'})
    assert (answer.status_code, answer.content) == (304, b"")


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_file_is_not_sent(
    saved: None, settings: Settings, script: TestClient, damage: str
) -> None:
    """A lost or truncated file is an error with a message, not a broken download."""
    path = settings.run_folder(1) / "checkpoints" / "step-00000400.pt"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(BODY[:-1])
    answer = script.get(PATH)
    assert answer.status_code == 404
    assert "step-00000400.pt" in answer.text


def test_a_list_names_the_download_of_each_file(saved: None, script: TestClient) -> None:
    """Lists of the API name each file's download URL; an unknown file is an API error."""
    [file, *_] = script.get("/api/v1/runs/1/checkpoints").json()["checkpoints"]
    assert file["download_url"] == f"/api/v1/runs/1/checkpoints/{file['id']}/download"
    answer = script.get(file["download_url"])
    assert (answer.status_code, answer.content) == (200, script.get(PATH).content)
    assert "attachment" in answer.headers["content-disposition"]
    for path in ("checkpoints/99/download", "artifacts/99/download", "log/download"):
        unknown = script.get(f"/api/v1/runs/2/{path}")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
        assert "content-disposition" not in unknown.headers
    described = script.get("/api/v1/openapi.json").json()["paths"]
    assert [path for path in described if path.startswith("/runs/")] == []


def test_file_of_another_run_is_not_there(saved: None, script: TestClient) -> None:
    """A checkpoint cannot be downloaded by the address of another run."""
    assert script.get("/runs/2/checkpoints/1/download").status_code == 404


def test_an_unreachable_bucket_is_named(
    database: Database, saved: None, settings: Settings, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable bucket is answered by 503 without its address; the log has the reason."""
    monkeypatch.setattr("app.files.downloads.RETRY_SECONDS", 0.1)
    for name, value in {
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "nowhere",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    with database.writing() as session:
        token, _row = accounts.make_api_token(session, ada, "script")
    away = settings.model_copy(update={"storage_url": "s3://bucket"})
    app = create_app(away, database)
    headers = {"Authorization": f"Bearer {token}"}
    with TestClient(app, base_url="http://localhost", headers=headers) as client:
        answer = client.get("/runs/1/checkpoints/1/download")
    assert answer.status_code == 503
    assert answer.json()["code"] == "storage_unreachable"
    assert "does not answer" in answer.json()["detail"]
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize(
    ("kind", "ending", "words", "module"),
    [
        ("weights", "", "weights", "model"),
        ("weights.generator", "-generator", "weights of generator", "generator"),
        ("ema", "-ema", "averaged weights", "model"),
        ("ema.generator", "-ema-generator", "averaged weights of generator", "generator"),
    ],
)
def test_weights_and_their_average_have_names_of_their_own(
    database: Database,
    running: Run,
    browser: TestClient,
    *,
    kind: str,
    ending: str,
    words: str,
    module: str,
) -> None:
    """Weights and averaged weights each have a name for download, and how to load them."""
    file = {"kind": kind, "path": "p", "size_bytes": 1, "sha256": SHA256}
    event = {"step": 400, "reason": "end", "files": [file]}
    with database.writing() as session:
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), ["key"])
    page = browser.get("/runs/1").text
    name = f"digits-fp16-run1-step400{ending}.safetensors"
    assert f">{words}</span>" in page
    assert f"{module}.load_state_dict(safetensors.torch.load_file(&#39;{name}&#39;))" in page


def test_the_page_says_how_a_learnt_model_is_loaded(
    database: Database, running: Run, browser: TestClient
) -> None:
    """For a language model the page shows from_pretrained; every run links to the help on files."""
    file = {"kind": "weights", "path": "p", "size_bytes": 1, "sha256": SHA256}
    event = {"step": 400, "reason": "end", "files": [file]}
    line = "AutoModelForCausalLM.from_pretrained(&#39;huggingface&#39;)"
    guide = browser.get("/help/recipes").text
    assert 'id="loading-saved-weights"' in guide
    with database.writing() as session:
        checkpoints.publish(session, running.id, running.attempt, checkpoint_of(event), ["key"])
    page = browser.get("/runs/1").text
    assert "/help/recipes#loading-saved-weights" in page
    assert line not in page
    with database.writing() as session:
        session.get_one(Run, running.id).recipe = "finetune"
    assert line in browser.get("/runs/1").text
