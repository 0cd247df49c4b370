"""Watched runs as their uploaders send them, on both databases."""

import hashlib
import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st
from sqlalchemy import select
from starlette.testclient import TestClient

from app.alerts.alert_delivery import AlertDelivery
from db.access import accounts, people, projects
from db.alerts import channels
from db.alerts.script_alerts import MOST_ALERTS
from db.database import Database
from db.files.backup import back_up, restore
from db.files.object_store import open_store
from db.files.storage import mismatches
from db.runs import history, runs
from db.settings import Settings
from db.tables import CheckpointFile, Delivery, Run, Status, User, WatchedAttempt
from db.telemetry import ingest, series, step_rows, telemetry
from db.telemetry.pyramid import END
from halfstep.telemetry import events
from halfstep.telemetry.spool import EVENT, FILE_HEADER, MAGIC, STEP_DTYPE, STEPS, VERSION, frame
from tests.app.uploading import Uploader, make_description, write_token
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_metric,
    make_steps,
    read_logged_points,
)
from tests.marks import looped
from tests.spool_made import event_of, spool_anything

pytestmark = pytest.mark.sql_sample


@pytest.fixture
def uploader(stranger: TestClient, database: Database, ada: User, tmp_path: Path) -> Uploader:
    """An uploader of Ada's with a token that writes."""
    return Uploader(stranger, write_token(database, ada), tmp_path / "spool")


def test_a_run_is_made_once(uploader: Uploader, script: TestClient) -> None:
    """The first upload call creates a run; a repeated one returns it with its spool's offset."""
    answer = uploader.begin()
    place = {"run": 1, "attempt": 1, "sequence": 0, "offset": 0, "page": "/runs/1"}
    place |= {"sidecar_sequence": 0, "sidecar_offset": 0}
    assert (answer.status_code, answer.json()) == (200, place | {"created_project": "digits"})
    assert uploader.begin().json() == place | {"created_project": None}
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["source"], run["name"]) == ("running", "watch", "baseline")
    assert (run["project"], run["tags"]) == ("digits", ["fp16", "a b"])
    assert run["config"] == make_description()["config"]
    assert [each["status"] for each in run["statuses"]] == ["running"]


def test_beginning_and_end_are_in_the_audit_log_once(
    uploader: Uploader, script: TestClient
) -> None:
    """Repeated calls, as by an uploader without a response, record nothing more."""
    for _ in range(2):
        uploader.begin(project="")
    for _ in range(2):
        assert uploader.end("failed", error="it raised").status_code == 200
    recorded = script.get("/api/v1/audit").json()["audit_events"]
    assert [(each["run_id"], each["detail"]) for each in recorded] == [
        (1, "the process has ended: failed"),
        (1, "a watched run began"),
    ]


def test_an_uploaded_run_was_created_when_it_started(
    uploader: Uploader, script: TestClient
) -> None:
    """A watched run is filtered and sorted by its start, not by its upload."""
    uploader.begin()
    created = datetime.fromisoformat("2026-01-02T03:04:05.678+00:00").timestamp()
    assert script.get("/api/v1/runs/1").json()["created_at"] == created
    for day, total in (("2026-01-02", 1), ("2026-01-03", 0)):
        listed = script.get("/api/v1/runs", params={"filter": f"since:{day}"}).json()
        assert listed["total"] == total


def test_a_spool_becomes_rows(uploader: Uploader, script: TestClient) -> None:
    """Steps, events and metrics are recorded as a worker's are, and the precision is derived."""
    uploader.begin()
    with uploader.spool() as spool:
        for event in (*make_events([2]), make_metric(3, 0.5)):
            spool.event(event_of(event))
        spool.steps(make_steps([3.0, 2.0, 1.0], skipped=[2]))
    answer = uploader.send()
    size = len(uploader.content())
    assert (answer.status_code, answer.json()) == (200, {"sequence": 0, "offset": size})
    run = script.get("/api/v1/runs/1").json()
    assert (run["step"], run["skipped"], run["loss"], run["precision"]) == (3, 1, 1.0, "fp16")
    assert run["health"]["word"] == "calibrating"
    assert script.get("/api/v1/runs/1/events").json()["total"] == 2
    assert script.get("/api/v1/runs/1/metrics").json()["total"] == 1


def steps_of(database: Database, run_id: int = 1) -> list[int]:
    with database.reading() as session:
        return [row.step for row in step_rows.read_rows(session, run_id, most=END)]


def spool_steps(uploader: Uploader, *lengths: int, **options: Any) -> bytes:
    """Spool a frame for each number of steps; return the file."""
    with uploader.spool(**options) as spool:
        first = 1
        for length in lengths:
            spool.steps(make_steps([1.0] * length, first=first))
            first += length
    return uploader.content()


@pytest.mark.slow
@pytest.mark.one_database
def test_a_piece_may_be_cut_anywhere(uploader: Uploader, database: Database) -> None:
    """A piece may be cut anywhere: the rest of its last frame is sent again with the next piece, at
    the returned offset.
    """
    uploader.begin()
    content = spool_steps(uploader, 2, 3, 4)
    offsets = []
    for end in range(1, len(content) + 1, 7):
        assert uploader.put(content[uploader.offset : end]).status_code == 200
        offsets.append(uploader.offset)
    assert uploader.send().json()["offset"] == len(content)
    assert {0, 16} < set(offsets)
    assert offsets == sorted(offsets)
    assert steps_of(database) == list(range(1, 10))


@pytest.mark.sql
def test_a_piece_that_is_sent_again_changes_nothing(uploader: Uploader, database: Database) -> None:
    """A repeated piece is rejected with the current offset, and so is one that leaves a gap."""
    uploader.begin()
    content = spool_steps(uploader, 2, 3)
    uploader.send()
    for offset in (0, 16, len(content) - 1, len(content) + 1):
        answer = uploader.put(content[offset:], offset=offset)
        problem = answer.json()
        assert answer.status_code == 409
        assert answer.headers["content-type"] == "application/problem+json"
        assert (problem["code"], problem["sequence"]) == ("offset", 0)
        assert problem["offset"] == len(content)
    assert uploader.begin().json()["offset"] == len(content)
    assert steps_of(database) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["header", "first", "second", "length", "checksum"])
@pytest.mark.one_database
def test_damaged_bytes_cost_their_frame_only(
    uploader: Uploader, database: Database, script: TestClient, place: str
) -> None:
    """Damaged bytes of an upload cost their frame, and are named in the log once."""
    uploader.begin()
    content = bytearray(spool_steps(uploader, 2, 3, 4))
    second = 16 + 12 + 2 * STEP_DTYPE.itemsize
    at = {"header": 3, "first": 40, "second": second + 30, "length": second + 2}
    content[at.get(place, second + 9)] ^= 0x55
    answer = uploader.put(bytes(content))
    assert (answer.status_code, answer.json()["offset"]) == (200, len(content))
    lost = {"header": [], "first": [1, 2]}.get(place, [3, 4, 5])
    assert steps_of(database) == [step for step in range(1, 10) if step not in lost]
    with database.reading() as session:
        [line] = [
            line.text for line in series.log_lines(session, 1, most=50) if "damaged" in line.text
        ]
    begin, size = {"header": (0, 16), "first": (16, second - 16)}.get(
        place, (second, 12 + 3 * STEP_DTYPE.itemsize)
    )
    assert f"{size:,} damaged bytes of the spool, from byte {begin:,}" in line
    assert uploader.begin().json()["offset"] == len(content)


def test_a_spool_without_its_header_is_recorded(uploader: Uploader, database: Database) -> None:
    """A spool that begins with a frame instead of a header is recorded to its end, once."""
    uploader.begin()
    content = spool_steps(uploader, 2, 3)[FILE_HEADER.size :]
    answer = uploader.put(content)
    assert (answer.status_code, answer.json()["offset"]) == (200, len(content))
    assert steps_of(database) == [1, 2, 3, 4, 5]


def test_an_end_reports_the_bytes_that_were_lost(
    uploader: Uploader, database: Database, script: TestClient
) -> None:
    """An end with lost bytes puts their number into the run's log once."""
    uploader.begin()
    spool_steps(uploader, 2)
    uploader.send()
    for _ in range(2):
        assert uploader.end("finished", step=2, lost_bytes=1234).status_code == 200
    with database.reading() as session:
        lines = [line.text for line in series.log_lines(session, 1, most=50)]
    assert sum("1,234 bytes of its spool were damaged" in line for line in lines) == 1
    assert script.get("/api/v1/runs/1").json()["status"] == "finished"


def test_the_next_file_begins_at_its_start(uploader: Uploader, database: Database) -> None:
    """A spool in several files is read file by file, and never backwards."""
    uploader.begin()
    spool_steps(uploader, 2, 3, 4, rotate_bytes=100)
    for sequence in range(3):
        uploader.sequence, uploader.offset = sequence, 0
        assert uploader.send().status_code == 200
    assert steps_of(database) == list(range(1, 10))
    uploader.sequence = 1
    assert uploader.put(b"", offset=0).json()["sequence"] == 2
    uploader.sequence = 3
    assert uploader.put(b"", offset=16).json()["code"] == "offset"


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.one_database
def test_a_piece_may_be_compressed(uploader: Uploader, database: Database, packed: bool) -> None:
    """Offsets refer to the uncompressed file; many transactions get one response."""
    uploader.begin()
    content = spool_steps(uploader, *[5000] * 6)
    answer = uploader.put(content, packed=packed)
    assert answer.json()["offset"] == len(content)
    assert len(steps_of(database)) == 30_000


@pytest.mark.slow
def test_large_values_are_rejected(uploader: Uploader) -> None:
    """A piece of more than 32 MiB is rejected, compressed or not."""
    uploader.begin()
    zeros = bytes(2**25 + 1)
    for packed in (False, True):
        answer = uploader.put(zeros, packed=packed)
        assert answer.status_code == 413
        assert "33,554,432 bytes" in answer.json()["detail"]
    assert uploader.put(b"x", **{"Content-Encoding": "br"}).status_code == 415


@pytest.mark.parametrize(
    ("piece", "encoding", "message"),
    [
        (b"no spool file at all", "", "is not a spool file of version 1"),
        (b"no gzip", "gzip", "not gzip"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\3", "gzip", "not exactly one complete gzip member"),
    ],
)
@pytest.mark.one_database
def test_a_body_that_is_no_spool_is_named(
    uploader: Uploader, piece: bytes, encoding: str, message: str
) -> None:
    """A body that is no spool gets 422 with the body's field name, and the offset does not
    change.
    """
    uploader.begin()
    answer = uploader.put(piece, **({"Content-Encoding": encoding} if encoding else {}))
    assert answer.status_code == 422
    assert message in answer.json()["errors"]["body"]
    assert uploader.begin().json()["offset"] == 0


@looped(
    "field, value, message",
    [
        ("id", "0" * 31, "allowed: text that matches"),
        ("attempt", 0, "at least 1"),
        ("attempt", 2**31, "at most 2147483647"),
        ("name", "", "1 or more characters"),
        ("name", "n" * 201, "at most 200 characters"),
        ("config", [1], "allowed: an object"),
        ("config", {"a": "x" * 10_001}, "at most 10,000"),
        ("config", {"a": 10**30}, "a whole number from"),
        ("config", {"a": "\0"}, "cannot be stored"),
        ("tags", ["t"] * 51, "at most 50 entries"),
        ("started", "yesterday", "datetime"),
        ("started", "2026-01-02T03:04:05", "timezone"),
        ("versions", {"torch": 2}, "allowed: text"),
    ],
)
@pytest.mark.one_database
def test_a_bad_field_is_named(uploader: Uploader, field: str, value: Any, message: str) -> None:
    """An invalid field gets 422 with its name, value and allowed values; no run is created."""
    answer = uploader.begin(**{field: value})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]
    assert uploader.begin().json()["run"] == 1


@pytest.mark.parametrize("config", [None, {}, {"a": float("nan"), "b": [1e999]}])
def test_any_configuration_is_kept(uploader: Uploader, script: TestClient, config: Any) -> None:
    """Any JSON configuration is stored, and None becomes an empty one; other values become text."""
    content = json.dumps(make_description(config=config, project=None, tags=[]))
    headers = uploader.headers | {"content-type": "application/json"}
    assert uploader.client.post("/api/v1/ingest", content=content, headers=headers).is_success
    kept = script.get("/api/v1/runs/1").json()["config"]
    assert kept == ({"a": "NaN", "b": ["Infinity"]} if config else {})


def test_the_environment_of_an_attempt_is_recorded(uploader: Uploader, script: TestClient) -> None:
    """The latest attempt's machine is recorded, and command and folder if the uploader
    sends them.
    """
    uploader.begin()
    result = script.get("/api/v1/runs/1/environment").json()
    assert (result["host"], result["command"], result["folder"]) == ("gpu-7", [], None)
    uploader.begin(attempt=2, command=["train.py", "--lr", "0.1"], folder="/home/ada")
    result = script.get("/api/v1/runs/1/environment").json()
    assert (result["attempt"], result["host"], result["folder"]) == (2, "gpu-7", "/home/ada")
    assert (result["command"], result["versions"]["torch"]) == (
        ["train.py", "--lr", "0.1"],
        "2.13.0",
    )
    assert (result["git"], result["source"]) == (None, None)
    wrong = uploader.begin(attempt=3, command=["train.py", "a\0b"], folder="a\0b")
    assert wrong.status_code == 422


def test_git_state_and_packages_are_recorded_and_shown(
    uploader: Uploader, script: TestClient, browser: TestClient
) -> None:
    """Git state and packages are stored as sent, escaped on the page, and limited in size."""
    uploader.begin(command=["python", "train.py"], folder="/home/ada")
    git = {"commit": "c0ffee", "branch": "<main>", "remote": "https://host/a.git", "folder": "src/"}
    git |= {"is_dirty": True, "changed": ["<b>.py"], "changed_count": 7, "is_pushed": False}
    source = {"git": git, "diff": "-a\n+<i>\n", "requirements": "torch==2.13.0"}
    place = f"/{uploader.run}/1/source"
    for _ in range(2):
        assert uploader.post(place, source).status_code == 200
    found = script.get("/api/v1/runs/1/environment").json()
    assert git.items() <= found["git"].items()
    assert (found["diff"], found["requirements"]) == (source["diff"], source["requirements"])
    assert (found["source"], found["command"]) == (None, ["python", "train.py"])
    page = browser.get("/runs/1").text
    shown = "c0ffee</code> of <code>&lt;main&gt;</code> from <code>https://host/a.git</code>"
    assert f"{shown}, not on a remote branch, with changes; changed: " in page
    assert "<code>&lt;b&gt;.py</code> and 2 more" in page
    assert "halfstep run reproduce 1" in page
    assert 'data-text="requirements"' in page
    for wrong in ({"diff": "x" * 256_001}, {"diff": "a\0b"}, {"git": {"changed": ["x"] * 51}}):
        assert uploader.post(place, wrong).status_code == 422
    assert uploader.post(f"/{uploader.run}/2/source", source).status_code == 404
    uploader.end()
    assert uploader.post(place, {}).status_code == 200
    assert script.get("/api/v1/runs/1/environment").json()["git"] is None


def test_a_preempted_run_is_cancelled_until_it_goes_on(
    uploader: Uploader, script: TestClient
) -> None:
    """A preempted run is cancelled until it continues; the reason has the signal and the job."""
    uploader.begin()
    ended = {"exit_code": -15, "preemption": "SIGTERM in Slurm job 42"}
    for _ in range(2):
        assert uploader.end("terminated", 0, **ended).status_code == 200
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["error"]) == ("cancelled", None)
    assert run["statuses"][-1]["reason"] == "preempted (SIGTERM in Slurm job 42)"
    assert uploader.begin().status_code == 200
    assert uploader.begin(attempt=2).status_code == 200
    assert script.get("/api/v1/runs/1").json()["status"] == "running"


@pytest.mark.sql
def test_a_later_attempt_fences_the_earlier(uploader: Uploader, database: Database) -> None:
    """After a later attempt has begun, uploads of the earlier one are rejected."""
    uploader.begin()
    content = spool_steps(uploader, 5, 5)
    uploader.put(content[:300])
    later = Uploader(uploader.client, uploader.headers["Authorization"][7:], uploader.folder)
    assert later.begin(attempt=2).json() == {
        "run": 1,
        "attempt": 2,
        "sequence": 0,
        "offset": 0,
        "sidecar_sequence": 0,
        "sidecar_offset": 0,
        "page": "/runs/1",
        "created_project": None,
    }
    for answer in (uploader.send(), uploader.begin(), uploader.end()):
        assert (answer.status_code, answer.json()["code"]) == (409, "stale_attempt")
    with later.spool() as spool:
        spool.event(event_of({"event": "resumed", "step": 3, "exact": False, "notes": ["by hand"]}))
        spool.event(event_of(make_metric(4, 0.5)))
        spool.steps(make_steps([2.0] * 2, first=4))
    assert later.put(later.content()[:-9]).status_code == 200  # all but the steps
    assert steps_of(database) == [1, 2, 3, 4, 5]
    assert later.send().status_code == 200
    with database.reading() as session:
        made = series.raw_steps(session, 1)
        assert list(zip(made["step"], made["loss"], strict=True)) == [
            (1, 1.0),
            (2, 1.0),
            (3, 1.0),
            (4, 2.0),
            (5, 2.0),
        ]
        assert history.resumptions(session, 1) == {2: 3}
        assert [point.step for point in read_logged_points(session)] == [4]
        log = [line.text for line in series.log_lines(session, 1)]
    assert log == ["resumed at step 3, not bit-exactly: by hand"]


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("finished", "finished", None),
        ("failed", "failed", "RuntimeError: CUDA out of memory"),
        ("terminated", "failed", "its process was terminated"),
        ("vanished", "failed", "its process exited unexpectedly (killed?)"),
    ],
)
def test_an_attempt_ends_as_its_process_did(
    uploader: Uploader, script: TestClient, how: str, status: str, reason: str | None
) -> None:
    """An attempt ends with the result of its process, and a repeated end changes nothing; the next
    attempt continues the run.
    """
    uploader.begin()
    spool_steps(uploader, 5)
    uploader.send()
    error = "Traceback: \0\nRuntimeError: CUDA out of memory\n" if how == "failed" else None
    for _ in range(2):
        assert uploader.end(how, step=5, error=error).status_code == 200
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["statuses"][-1]["reason"]) == (status, reason)
    times = [change["time"] for change in run["statuses"]]
    assert times == [run["started_at"], run["ended_at"]]
    assert run["seconds"] == pytest.approx(
        0.025, abs=1e-5
    )  # five steps of 5 ms, whenever they were sent
    assert (run["error"] or "").startswith("Traceback" if error else reason or "")
    assert uploader.begin().status_code == 200
    assert uploader.send().json()["code"] == "ended"
    assert uploader.begin(attempt=2).status_code == 200
    run = script.get("/api/v1/runs/1").json()
    assert (run["status"], run["ended_at"], run["error"]) == ("running", None, None)


def test_an_end_says_what_did_not_come(uploader: Uploader, script: TestClient) -> None:
    """An end with lost steps reports their number."""
    uploader.begin()
    spool_steps(uploader, 5)
    uploader.send()
    uploader.end("terminated", step=9)
    reason = script.get("/api/v1/runs/1").json()["statuses"][-1]["reason"]
    assert reason == "its process was terminated; 5 of its 9 steps were received"


def test_a_run_that_a_person_ended_takes_nothing_more(
    uploader: Uploader, script: TestClient, browser: TestClient
) -> None:
    """The attempt that a user ended accepts nothing more; a later attempt may continue."""
    uploader.begin()
    content = spool_steps(uploader, 5)
    uploader.put(content[:100])
    assert browser.post("/runs/1/cancellation").status_code == 303
    assert script.get("/api/v1/runs/1").json()["status"] == "cancelled"
    for answer in (uploader.send(), uploader.begin(), uploader.end("finished", step=5)):
        assert (answer.status_code, answer.json()["code"]) == (409, "ended")
        assert "cancelled by ada" in answer.json()["detail"]
    assert script.post("/api/v1/runs/1/cancellation").status_code == 409
    assert uploader.begin(attempt=2).status_code == 200


#: Requests on a run, by route: method, path below the run and body.
ON_A_RUN = {
    "spool": ("PUT", "/1/0?offset=0", b""),
    "sidecar": ("PUT", "/1/sidecar/0?offset=0", b""),
    "file": ("PUT", f"/1/files/a.pt?offset=0&size=1&sha256={'0' * 64}", b"x"),
    "end": ("POST", "/1/end", b'{"status": "finished", "step": 0}'),
    "lines": ("POST", "/log", b'{"step": 1, "loss": 0.5}'),
    "no lines": ("POST", "/log", b""),
}


@pytest.mark.parametrize("is_own", [False, True])
def test_a_hidden_run_is_answered_as_a_missing_one(
    uploader: Uploader, database: Database, ada: User, is_own: bool
) -> None:
    """A hidden run gets the status and text of a missing one, even for its owner without the
    role.
    """
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        projects.make(session, "digits")
        projects.set_role(session, bob, "digits", "member")
        tokens = [
            accounts.make_api_token(session, bob, kind, kind, project=project)[0]
            for kind, project in (("write", None), ("full", None), ("write", "digits"))
        ]
    if is_own:
        uploader.headers = {"Authorization": f"Bearer {tokens[0]}"}
    assert uploader.begin().json()["run"] == 1
    with database.writing() as session:
        projects.take_role(session, people.named(session, "bob"), "digits")
    for token, (method, path, body) in product(tokens, ON_A_RUN.values()):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        hidden, missing = (
            uploader.client.request(
                method, f"/api/v1/ingest/{run}{path}", content=body, headers=headers
            )
            for run in (1, 2)
        )
        assert hidden.status_code == missing.status_code
        assert hidden.text.replace("run 1", "run 2") == missing.text
        assert hidden.status_code == (404 if token in tokens[:2] else 403)


def test_strangers_and_other_users_are_rejected(
    uploader: Uploader, database: Database, script: TestClient
) -> None:
    """Uploads get 401 without a valid token, 403 for a visible run and 404 for a missing one."""
    uploader.begin()
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        projects.set_role(session, bob, "digits", "member")
    for token, status in (("hs_wrong", 401), (write_token(database, bob), 403)):
        uploader.headers = {"Authorization": f"Bearer {token}"}
        for answer in (uploader.put(b""), uploader.end()):
            assert (answer.status_code, answer.headers["content-type"]) == (
                status,
                "application/problem+json",
            )
    assert uploader.begin().json()["run"] == 2  # bob's own, of the same id
    for path in ("99/1/0", "2/7/0"):
        answer = uploader.client.put(
            f"/api/v1/ingest/{path}", params={"offset": 0}, headers=uploader.headers
        )
        assert answer.status_code == 404


def test_a_project_without_permission_is_named(uploader: Uploader, database: Database) -> None:
    """A project without upload permission is named in the error, and so is the Default project."""
    with database.writing() as session:
        bob = accounts.user_named(session, "bob")
        projects.set_role(session, bob, projects.DEFAULT, "viewer")
    uploader.headers = {"Authorization": f"Bearer {write_token(database, bob)}"}
    for project, named in (("digits", "'digits'"), ("", "Default project")):
        answer = uploader.begin(project=project)
        text = f"you may not upload runs to {named}; ask its maintainers"
        assert (answer.status_code, answer.json()["errors"]) == (422, {"project": text})


def test_a_full_token_may_send_too(uploader: Uploader, script: TestClient) -> None:
    """A full token may do all that its owner may."""
    uploader.headers = {"Authorization": script.headers["Authorization"]}
    assert uploader.begin().status_code == 200


def test_a_run_of_a_recipe_is_not_written_to(uploader: Uploader, running: Run) -> None:
    """An uploader cannot write to a run that a worker trains."""
    uploader.run, uploader.attempt = running.id, running.attempt
    assert uploader.put(b"").status_code == 404
    assert uploader.end().status_code == 404


def test_a_frame_that_cannot_be_recorded_costs_nothing_but_itself(
    uploader: Uploader, database: Database
) -> None:
    """A frame that cannot be recorded is named by the run's log, and the rest is recorded."""
    uploader.begin()
    with uploader.spool() as spool:
        spool.steps(make_steps([1.0] * 3))
    spool_anything(uploader.folder, 1, {"event": "metric", "step": -1}, "nonsense")
    with (uploader.folder / "1-0.spool").open("ab") as file:
        file.write(frame(EVENT, json.dumps(make_metric(3, 0.5)).encode()))
    assert uploader.send().json()["offset"] == len(uploader.content())
    with database.reading() as session:
        [line] = series.log_lines(session, 1)
        assert [point.step for point in read_logged_points(session)] == [3]
        assert runs.get(session, 1).status == Status.RUNNING
    assert "some data could not be recorded: metric at step -1: " in line.text
    assert line.text.endswith("and 1 more frames")


@pytest.mark.sql
def test_a_row_that_the_database_rejects_affects_no_other(
    uploader: Uploader, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that the checks let pass and the database rejects affects no other row."""
    record = telemetry.record

    def refuse(session: Any, run_id: int, attempt: int, flush: telemetry.Flush) -> None:
        if any(isinstance(event, events.Metric) and event.name == "bad" for event in flush.events):
            raise ValueError("out of range")
        record(session, run_id, attempt, flush)

    monkeypatch.setattr(telemetry, "record", refuse)
    uploader.begin()
    with uploader.spool() as spool:
        spool.steps(make_steps([1.0] * 3))
        for name in ("good", "bad", "better"):
            spool.event(event_of(make_metric(3, 0.5, name)))
    assert uploader.send().json()["offset"] == len(uploader.content())
    assert steps_of(database) == [1, 2, 3]
    with database.reading() as session:
        assert {point.name for point in read_logged_points(session)} == {"good", "better"}
        [line] = series.log_lines(session, 1)
    assert "ValueError" in line.text
    assert "'bad'" in line.text


def test_a_script_may_configure_late(uploader: Uploader, script: TestClient) -> None:
    """A run's configuration is the last one that its attempt sent."""
    uploader.begin()
    uploader.begin(config={"lr": 0.2})
    assert script.get("/api/v1/runs/1").json()["config"] == {"lr": 0.2}
    uploader.begin(attempt=2, config={"lr": 0.3})
    found = script.get("/api/v1/runs", params={"filter": "lr=0.3"}).json()
    assert [run["id"] for run in found["runs"]] == [1]


def test_a_script_describes_its_run(uploader: Uploader, script: TestClient) -> None:
    """A script's note becomes the run's unless the run has one; charts offer the script's x
    axes.
    """
    identifier = uploader.begin() and make_description()["id"]
    with uploader.spool() as spool:
        for note, axes in (("first try", {"val/*": "epoch"}), ("another", {"val/*": "samples"})):
            spool.event(events.Described(note=note, step_metrics=axes))
    uploader.send()
    assert script.get("/api/v1/runs/1").json()["note"] == "first try"
    assert 'value="metric:samples"' in script.get("/runs/1").text
    found = script.get(f"/runs/watched/{identifier}", follow_redirects=False)
    assert found.headers["location"] == "/runs/1"
    assert script.get("/runs/watched/none").status_code == 404


def test_a_script_changes_the_labels_that_no_user_has_changed(
    uploader: Uploader, script: TestClient
) -> None:
    """A script's new name, note and tags replace its own earlier ones only."""
    uploader.begin()
    run = script.get("/api/v1/runs/1").json()
    known = events.Labels(name=run["name"], tags=run["tags"])
    with uploader.spool() as spool:
        spool.event(events.Described(name="warm", note="n", tags=["one", "two"], before=known))
        known = events.Labels(name="warm", note="n", tags=["one", "two"])
        spool.event(events.Described(note="better", tags=["two"], before=known))
        uploader.send()
        run = script.get("/api/v1/runs/1").json()
        assert (run["name"], run["note"], run["tags"]) == ("warm", "better", ["two"])
        changed = {"name": "mine", "note": "by hand", "tags": ["two", "mine"]}
        assert script.patch("/api/v1/runs/1", json=changed).is_success
        known = events.Labels(name="warm", note="better", tags=["two"])
        spool.event(events.Described(name="hot", note="no", tags=["three"], before=known))
    uploader.send()
    run = script.get("/api/v1/runs/1").json()
    assert (run["name"], run["note"], run["tags"]) == ("mine", "by hand", ["mine", "three"])


def test_an_alert_of_a_script_is_its_owners(
    uploader: Uploader, script: TestClient, database: Database, ada: User, settings: Settings
) -> None:
    """A script's alert reaches its owner's inbox and channels; a loop of alerts is limited."""
    settings.data.mkdir(exist_ok=True)
    with database.writing() as session:
        address = {"kind": "webhook", "name": "n", "address": "http://here/"}
        channels.make(session, settings.secrets_key, ada, **address)
        off, _ = channels.make(session, settings.secrets_key, ada, **address | {"name": "off"})
        off.is_on = False
    uploader.begin()
    with uploader.spool() as spool:
        for number in range(MOST_ALERTS + 5):
            spool.event(events.Alert(title="Low", text=f"accuracy {number}", level="warn"))
    uploader.send()
    inbox = script.get("/api/v1/alerts/inbox", params={"limit": 200}).json()["alerts"]
    assert len(inbox) == MOST_ALERTS
    assert inbox[-1]["text"] == "Run 1, baseline: Low: accuracy 0"
    with database.reading() as session:
        sent = session.scalars(select(Delivery).order_by(Delivery.id)).all()
        assert len(sent) == MOST_ALERTS
        delivery = AlertDelivery(settings, database, threading.Event())
        content = json.loads(delivery._body(sent[0]))
    assert (content["level"], content["run"]["url"]) == ("warn", f"{settings.address}/runs/1")


def test_a_run_may_make_no_step(uploader: Uploader, database: Database, script: TestClient) -> None:
    """Metrics of a run without steps are recorded at once; those of a later attempt replace them
    from its first step on.
    """
    uploader.begin()
    with uploader.spool() as spool:
        for step in (1, 2, 3):
            spool.event(event_of(make_metric(step, 0.5)))
    uploader.send()

    def read() -> list[tuple[int, float | None]]:
        with database.reading() as session:
            return [(point.step, point.value) for point in read_logged_points(session)]

    assert read() == [(1, 0.5), (2, 0.5), (3, 0.5)]
    page = script.get("/api/v1/runs/1/series").json()
    assert (page["total"], page["first"], page["last"]) == (0, 1, 3)
    uploader.begin(attempt=2)
    with uploader.spool() as spool:
        spool.event(event_of({"event": "resumed", "step": 1, "exact": False, "notes": []}))
        spool.event(event_of(make_metric(2, 0.25)))
    uploader.send()
    assert read() == [(1, 0.5), (2, 0.25)]


def test_what_waits_for_the_first_steps_is_bounded(
    uploader: Uploader, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events for steps that never come are limited, so that they do not fill the database."""
    monkeypatch.setattr(ingest, "EARLY_BYTES", 200)
    uploader.begin()
    spool_steps(uploader, 2)
    uploader.send()
    uploader.begin(attempt=2)
    with uploader.spool() as spool:
        for step in (5, 6, 7):
            spool.event(event_of(make_metric(step, 0.5)))
    uploader.send()
    with database.reading() as session:
        assert session.get_one(WatchedAttempt, (1, 2)).early == []
        assert "more than 200 bytes" in series.log_lines(session, 1)[-1].text


@pytest.mark.slow
@trying(suppress_health_check=list(HealthCheck))
@given(
    begun=st.booleans(),
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(frame, st.integers(0, 255), st.binary(max_size=200)),
            st.builds(
                frame,
                st.just(EVENT),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                ).map(lambda value: json.dumps(value).encode()),
            ),
            st.builds(frame, st.just(STEPS), st.binary(min_size=52 * 3, max_size=52 * 3)),
        ),
        max_size=5,
    ),
)
def test_no_bytes_make_the_server_fail(
    uploader: Uploader, script: TestClient, begun: bool, pieces: list[bytes]
) -> None:
    """Arbitrary bytes are recorded or rejected, and the run's pages still work."""
    uploader.begin(id=uuid.uuid4().hex)
    header = FILE_HEADER.pack(MAGIC, VERSION) if begun else b""
    answer = uploader.put(header + b"".join(pieces))
    assert answer.status_code in (200, 422)
    assert script.get(f"/api/v1/runs/{uploader.run}").status_code == 200
    assert script.get(f"/runs/{uploader.run}").status_code == 200
    assert script.get("/runs").status_code == 200


@pytest.mark.slow
@pytest.mark.only_on("postgresql")
def test_eight_runs_at_once(address: str, database: Database, ada: User, tmp_path: Path) -> None:
    """Eight concurrent uploads are each recorded completely."""
    token = write_token(database, ada)

    def send(number: int) -> int:
        with httpx2.Client(base_url=address, timeout=None) as client:
            uploader = Uploader(client, token, tmp_path / str(number))
            uploader.begin(id=f"{number:032x}", name=f"run {number}")
            spool_steps(uploader, *[100] * 2)
            while uploader.offset < len(uploader.content()):
                end = uploader.offset + 7000
                uploader.put(uploader.content()[uploader.offset : end]).raise_for_status()
            uploader.end("finished", step=200)
            return uploader.run

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(send, range(8)))
    assert sorted(made) == list(range(1, 9))
    for run_id in made:
        assert steps_of(database, run_id) == list(range(1, 201))


@pytest.mark.sql
def test_two_that_begin_a_run_at_once_make_one(
    address: str, database: Database, ada: User, tmp_path: Path
) -> None:
    """Two concurrent first calls with one id create one run per owner."""
    token = write_token(database, ada)

    def begin(_number: int) -> Any:
        with httpx2.Client(base_url=address, timeout=None) as client:
            return Uploader(client, token, tmp_path).begin().json()["run"]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(begin, range(8))) == {1}


CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CHECKPOINT = "checkpoints/step-00000003/last.pt"
PICTURE = "artifacts/step-00000003/x.png"


@pytest.fixture
def announced(uploader: Uploader) -> Uploader:
    """An uploader with a run that announced a checkpoint and an image of the same content."""
    uploader.begin()
    here = {"size_bytes": len(CONTENT), "sha256": SHA256}
    files = [{"kind": "checkpoint", "path": CHECKPOINT, **here}]
    with uploader.spool() as spool:
        spool.steps(make_steps([1.0] * 3))
        spool.event(
            event_of({"event": "checkpoint", "step": 3, "reason": "request", "files": files})
        )
        spool.event(
            event_of({"event": "artifact", "step": 3, "name": "x.png", "path": PICTURE, **here})
        )
    uploader.send()
    return uploader


def put_piece(uploader: Uploader, path: str, first: int, last: int) -> Any:
    piece, size = CONTENT[first:last], len(CONTENT)
    return uploader.put_file(path, piece, offset=first, size=size, sha256=SHA256)


def test_a_file_that_was_not_sent_is_reported(announced: Uploader, script: TestClient) -> None:
    """A missing file is listed with size and hash; one stored elsewhere cannot be downloaded."""
    [file] = script.get("/api/v1/runs/1/checkpoints").json()["checkpoints"]
    assert (file["is_stored"], file["path"], file["sha256"]) == (False, CHECKPOINT, SHA256)
    answer = script.get("/runs/1/checkpoints/1/download")
    assert answer.status_code == 404
    assert "only on the training machine" in answer.json()["detail"]


@pytest.mark.parametrize("path", [CHECKPOINT, PICTURE])
def test_a_file_comes_in_pieces(announced: Uploader, script: TestClient, path: str) -> None:
    """A repeated piece of a file gets the current offset; the checksum is that of the whole
    file.
    """
    assert put_piece(announced, path, 0, 4000).json() == {"offset": 4000, "stored": False}
    again = put_piece(announced, path, 0, 4000)
    assert (again.status_code, again.json()["code"], again.json()["offset"]) == (
        409,
        "offset",
        4000,
    )
    announced.end("finished", step=3)  # files may follow the end
    for _ in range(2):
        last = put_piece(announced, path, 4000, len(CONTENT))
        assert last.json() == {"offset": len(CONTENT), "stored": True}
    kind = path.partition("/")[0]
    [file] = script.get(f"/api/v1/runs/1/{kind}").json()[kind]
    assert file["is_stored"]
    download = script.get(f"/runs/1/{kind}/{file['id']}/download")
    assert download.content == CONTENT
    assert "baseline-run1-step3-" in download.headers["content-disposition"]


def test_a_damaged_file_starts_over(announced: Uploader) -> None:
    """A file whose checksum does not match is uploaded again from offset 0."""
    size = len(CONTENT)
    answer = announced.put_file(CHECKPOINT, bytes(size), offset=0, size=size, sha256=SHA256)
    assert answer.status_code == 422
    assert "start again at offset 0" in answer.json()["errors"]["sha256"]
    assert put_piece(announced, CHECKPOINT, 0, size).json()["stored"]


def test_an_unannounced_file_is_rejected(announced: Uploader) -> None:
    """A file with another path, size, hash or more bytes than announced is rejected."""
    for path in ("checkpoints/other.pt", "../../halfstep.db", "artifacts/%00", "run.json"):
        assert put_piece(announced, path, 0, 10).status_code == 404
    wrong = announced.put_file(CHECKPOINT, b"x", offset=0, size=1, sha256=SHA256)
    assert "allowed: as its event says" in wrong.json()["errors"]["size, sha256"]
    size = len(CONTENT)
    longer = announced.put_file(CHECKPOINT, CONTENT + b"x", offset=0, size=size, sha256=SHA256)
    assert "allowed: at most the size" in longer.json()["errors"]["body"]


def test_a_file_of_a_cancelled_or_fenced_run_is_rejected(
    announced: Uploader, script: TestClient
) -> None:
    """Files of a cancelled run or a stale attempt are rejected, as its spool is."""
    script.post("/api/v1/runs/1/cancellation")
    assert put_piece(announced, CHECKPOINT, 0, 10).json()["code"] == "ended"
    announced.begin(attempt=2)
    announced.attempt = 1
    assert put_piece(announced, CHECKPOINT, 0, 10).json()["code"] == "stale_attempt"


def test_a_failing_disk_is_named(announced: Uploader, settings: Settings) -> None:
    """A failing disk is answered by 503, so that the client retries later."""
    settings.run_folder(1).parent.mkdir(parents=True)
    settings.run_folder(1).write_text("no folder")
    answer = put_piece(announced, CHECKPOINT, 0, 10)
    assert (answer.status_code, answer.json()["code"]) == (503, "storage_unreachable")


def test_a_file_announced_again_stays_unless_it_changed(
    announced: Uploader, script: TestClient
) -> None:
    """A resumed run sends a file again only if it changed."""
    put_piece(announced, CHECKPOINT, 0, len(CONTENT))
    announced.begin(attempt=2)
    for sha256, is_stored in ((SHA256, True), ("0" * 64, False)):
        file = {"kind": "checkpoint", "path": CHECKPOINT, "size_bytes": 10240, "sha256": sha256}
        event = {"event": "checkpoint", "step": 3, "reason": "request", "files": [file]}
        spool_anything(announced.folder, 2, event)
        announced.send()
        [found] = script.get("/api/v1/runs/1/checkpoints").json()["checkpoints"]
        assert found["is_stored"] is is_stored


@pytest.mark.slow
def test_a_file_that_is_elsewhere_is_neither_missing_nor_lost(
    announced: Uploader, database: Database, settings: Settings, tmp_path: Path
) -> None:
    """The storage check ignores files that are stored elsewhere, and a backup keeps their rows."""
    announced.end("finished", step=3)
    store = open_store(settings)
    with database.reading() as session:
        assert mismatches(session, store) == []
    made = back_up(database, store, tmp_path / "backup")
    assert (made["files"], made["left_out"]) == (0, [])
    restored = Database(f"sqlite:///{tmp_path}/restored.db")
    restored.migrate()
    restore(restored, store, tmp_path / "backup")
    with restored.reading() as session:
        assert [row.path for row in session.scalars(select(CheckpointFile))] == [CHECKPOINT]
    restored.dispose()
