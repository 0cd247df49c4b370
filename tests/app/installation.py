"""An installation in use: two projects that share no member, with rows in every table.

Every text of the hidden project that no request has to name contains MARK, and its files FILE_MARK.
"""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Boolean, Integer, LargeBinary, Table, func, insert, select
from sqlalchemy.orm import Session

from app.checks.checks import to_row
from app.sweeps.sweep_submission import SweepSubmission, begin
from db.access import accounts, projects, shared_links
from db.access.permissions import MAINTAINER, MEMBER, VIEWER
from db.database import Database
from db.files import artifact_versions, report_images
from db.runs import environments, notes, reports, run_metadata
from db.runs.environments import Texts
from db.runs.reports import Content
from db.settings import Settings
from db.tables import (
    Alert,
    Artifact,
    CheckpointFile,
    Delivery,
    LogLine,
    Placement,
    Preset,
    RetentionRule,
    Run,
    User,
)
from db.tables import Table as Base
from db.telemetry import ingest
from halfstep.artifacts.manifest import Entry
from halfstep.check.report import Report, Row
from halfstep.telemetry.events import UsedArtifact
from tests.app.conftest import CONFIG, CPU, start_run
from tests.db.telemetry.telemetry_made import (
    make_events,
    make_headroom,
    make_histogram,
    make_metric,
    make_module,
    make_replay,
    make_skip,
    make_steps,
    record,
)

MARK, FILE_MARK = "qzhush", "wxfile"
#: What a user mistypes: "did you mean …?" would answer with the name of a hidden setting.
NEAR = "qzhus_setting"
HIDDEN, OPEN = "vault-9", "agora-9"
NOT_CONVERTED = {"frozen_steps", "step_conversions"}
#: Values of columns that are one of a few words, or what code reads.
WORDS: dict[str, Any] = {
    "status": "finished",
    "state": "complete",
    "kind": "webhook",
    "condition": "ended",
    "scope": "run",
    "stream": "stdout",
    "action": "POST /runs",
}


@dataclass
class Side:
    """A project with its users. ids: its rows, by the names of path parameters."""

    project: str
    owner: User
    runs: list[int]
    ids: dict[str, int]
    upload: str
    mark: str


@dataclass
class Installation:
    """The two projects, and who has which role. users: by name."""

    hidden: Side
    open: Side
    users: dict[str, User]


def install(settings: Settings, database: Database, operator: User) -> Installation:
    """Fill every table for both projects; the admin owns none of the rows."""
    settings.data.mkdir(exist_ok=True)
    sides = [
        _side(settings, database, operator, project, mark)
        for project, mark in ((HIDDEN, MARK), (OPEN, "agora"))
    ]
    hidden, opened = sides
    with database.writing() as session:
        people = {"both": ((HIDDEN, MEMBER), (OPEN, MEMBER)), "viewer": ((HIDDEN, VIEWER),)}
        people |= {"outsider": ((OPEN, MAINTAINER),), "left": ((OPEN, MEMBER),)}
        users = {}
        for name, roles in people.items():
            users[name] = accounts.make_user(session, name)
            for project, role in roles:
                projects.set_role(session, users[name], project, role)
        projects.get(session, HIDDEN).viewers_download = False
        for user in (users["left"], users["outsider"]):  # alerts of before their role was taken
            _alert(session, user, hidden)
    users |= {"owner": hidden.owner, "operator": operator}
    return Installation(hidden, opened, users)


def tables() -> list[Table]:
    """Return all tables, referenced ones first.

    Tables of unconverted steps are left out, because a run with them shows no steps.
    """
    return [each for each in Base.metadata.sorted_tables if each.name not in NOT_CONVERTED]


def empty_tables(session: Session) -> list[str]:
    """Return the names of tables without a row."""
    counts = {
        table.name: session.scalar(select(func.count()).select_from(table)) for table in tables()
    }
    return [name for name, count in counts.items() if not count]


def _side(settings: Settings, database: Database, operator: User, project: str, mark: str) -> Side:
    with database.writing() as session:
        projects.make(session, project)
        owner = accounts.make_user(session, f"{mark}-owner")
        projects.set_role(session, owner, project, MAINTAINER)
    config = CONFIG | {"more": {f"{mark}_setting": 1.0, "text": f"{mark} value"}}
    named = {"name": f"{mark} run", "tags": f"{mark}-tag", "project": project, "config": config}
    run = start_run(database, owner, **named)
    _telemetry(database, run, mark)
    side = Side(project, owner, [run.id], {"run_id": run.id}, f"{'0' * 64}/{mark}.pt", mark)
    with database.writing() as session:
        _watch(session, side)
        given: dict[str, Any] = {"space": {"training.batch_size": [8, 16]}, "goal": "minimise"}
        given |= {"recipe": "digits", "project": project, "name": f"{mark} sweep"}
        sweep = begin(session, owner, SweepSubmission(**given))
        side.ids["sweep_id"] = sweep.id
        row = session.get_one(Run, run.id)
        row.group_id, row.error, row.stop_reason = run.id, f"{mark} error", f"{mark} reason"
        run_metadata.edit(session, run.id, owner, {"note": f"{mark} note"}, None)
        notes.write(session, owner, notes.of_project(project), f"{mark} project note", "")
        notes.write(session, owner, notes.of_runs(side.runs), f"{mark} comparison note", "")
        _files(settings, session, side)
        _artifact(settings, session, side)
        _add_kept(session, side)
        _alert(session, owner, side)
        _secret, link = shared_links.make(session, owner, [run.id], 7)
        side.ids["link_id"] = link.id
        _token, token = accounts.make_api_token(session, owner, f"{mark} token")
        side.ids["token_id"] = token.id
        accounts.start_session(session, owner)
        accounts.make_link_token(session, owner)
    with database.writing() as session:
        for name in empty_tables(session):
            session.execute(insert(Base.metadata.tables[name]).values(_row(name, side)))
    return side


def _telemetry(database: Database, run: Run, mark: str) -> None:
    module = make_module(f"{mark}.module", -10, [1, 2, 3])
    events = [
        *make_events([3]),
        make_skip(4, f"{mark}.weight"),
        make_metric(5, 0.5, f"{mark}/metric"),
        *(make_metric(step, 0.5) for step in range(1, 70)),
        make_histogram(6, module),
        make_headroom(7, **{f"{mark}.layer": (1.0, 1.0)}),
        make_replay(8, notes=[f"{mark} replay note"]),
    ]
    record(database, run, make_steps([1.0] * 200, skipped=[3, 4]), events=events)
    content = dict.fromkeys(("worker", "host", "platform", "folder"), f"{mark} machine")
    content |= {"devices": [CPU | {"name": f"{mark} CPU"}], "file": None, "git": None}
    content |= {"command": [f"{mark}.py"], "versions": {"torch": f"{mark} 2"}}
    line = {"number": 1, "attempt": 1, "time": 1.0, "stream": "stdout", "text": f"{mark} line"}
    with database.writing() as session:
        texts = Texts(f"{mark} source", f"{mark} diff")
        environments.record(session, run.id, run.attempt, content, texts)
        session.add(LogLine(run_id=run.id, **line))
        session.add(
            Placement(
                run_id=run.id,
                attempt=2,
                nodes=1,
                devices=1,
                attempts=1,
                state="waiting",
                reason=f"{mark} placement",
                placed_at=1.0,
            )
        )


def _watch(session: Session, side: Side) -> None:
    place = {"name": f"{side.mark} watched", "tags": side.mark, "project": side.project}
    place |= {"host": f"{side.mark} host", "config": {f"{side.mark}_lr": 0.1}}
    attempt = ingest.begin(
        session,
        side.owner,
        hashlib.md5(side.mark.encode()).hexdigest(),
        1,
        started_at=0.0,
        versions={},
        **place,
    )
    side.runs.append(attempt.run_id)


def _files(settings: Settings, session: Session, side: Side) -> None:
    run_id, content = side.runs[0], f"{FILE_MARK} of {side.mark}".encode()
    about: dict[str, Any] = {
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    for kind in ("checkpoint", "weights"):
        row = CheckpointFile(
            run_id=run_id, step=5, kind=kind, attempt=1, reason="interval", **about
        )
        row.key = f"runs/{run_id}/checkpoints/{kind}.pt"
        session.add(row)
        _write(settings.data / row.key, content)
    artifact = Artifact(run_id=run_id, step=5, name=f"{side.mark}.txt", **about)
    artifact.key = f"runs/{run_id}/artifacts/a.txt"
    session.add(artifact)
    _write(settings.data / artifact.key, content)
    _write(settings.data / "uploads" / side.upload, content)
    panels = [{"kind": "panel", "runs": [run_id], "metrics": ["loss"], "axes": []}]
    block = f"```panel\nruns: {run_id}\nmetrics: loss\n```"
    written = Content(f"{side.mark} report", f"{side.mark} report text\n\n{block}", panels)
    report = reports.create(session, side.owner, side.project, written)
    # Those who see a report see its images, also where they may not download files of runs.
    picture = f"{side.mark} image".encode()
    own = _about(picture)
    image = report_images.record(session, side.owner, report.id, media_type="image/png", **own)
    _write(settings.data / image.key, picture)
    session.flush()
    side.ids |= {"checkpoint_id": row.id, "artifact_id": artifact.id}
    side.ids |= {"report_id": report.id, "image_id": image.id}


def _about(content: bytes) -> dict[str, Any]:
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _artifact(settings: Settings, session: Session, side: Side) -> None:
    """Save a version of an artifact, which the side's run uses."""
    content = f"{FILE_MARK} of {side.mark}".encode()
    entry = Entry(f"{side.mark}.txt", len(content), hashlib.sha256(content).hexdigest())
    project, name = side.project, f"{side.mark}-data"
    version = artifact_versions.save(
        session, side.owner, project, name, type=f"{side.mark}-type", entries=[entry]
    )
    key = f"blobs/{side.mark}"
    _write(settings.data / key, content)
    identity = (entry.sha256, entry.size_bytes)
    artifact_versions.store_blob(session, *identity, key, version_id=version.id)
    event = UsedArtifact(project=project, name=name, digest=version.digest)
    artifact_versions.use_by_run(session, session.get_one(Run, side.runs[0]), event)
    side.ids |= {"collection_id": version.collection_id, "version_id": version.id}


def _add_kept(session: Session, side: Side) -> None:
    """Add what users store: a preset, a retention rule, a check, a view and an upload."""
    of = {"user_id": side.owner.id, "project": side.project}
    preset = Preset(name=f"{side.mark} preset", recipe="digits", config={}, place={}, **of)
    session.add_all((preset, RetentionRule(log_days=3000.0, **of)))
    for name in ("saved_views", "uploads"):
        session.execute(insert(Base.metadata.tables[name]).values(_row(name, side)))
    file = f"{side.mark}.py"
    row = Row(kind="overflow", is_fault=True, title="", text=f"{side.mark} text", file=file, line=1)
    report = Report(script=file, torch="2", steps=1, rows=[row], unknown_operators={}, errors=[])
    check = to_row(report, {file: f"{side.mark} = 1\n"})
    check.user_id, check.project = side.owner.id, side.project
    session.add(check)
    session.flush()
    side.ids |= {"preset_id": preset.id, "check_id": check.id}


def _alert(session: Session, user: User, side: Side) -> None:
    """Add a rule, a channel, an alert of the side's run and its delivery."""
    ids = {}
    for name in ("channels", "alert_rules"):
        values = _row(name, side) | {"user_id": user.id}
        if user is not side.owner:  # what they typed themselves is theirs to see
            own = dict.fromkeys(("name", "target", "ciphertext", "metric", "project"), "")
            values |= {column: own[column] for column in values.keys() & own.keys()}
        key = session.execute(insert(Base.metadata.tables[name]).values(values))
        ids[name] = key.inserted_primary_key[0]
    text = f"{side.mark} alert"
    alert = Alert(
        user_id=user.id,
        rule_id=ids["alert_rules"],
        run_id=side.runs[0],
        condition="ended",
        text=text,
        content={"text": text},
    )
    session.add(alert)
    session.flush()
    session.add(
        Delivery(
            user_id=user.id,
            channel_id=ids["channels"],
            alert_id=alert.id,
            run_id=side.runs[0],
            body=text,
            due_at=4e9,
            answer=text,
        )
    )
    if user is side.owner:
        side.ids |= {"channel_id": ids["channels"], "rule_id": ids["alert_rules"]}


def _row(name: str, side: Side) -> dict[str, Any]:
    """Return a row of a table with every column filled except self-numbering keys."""
    table = Base.metadata.tables[name]
    return {
        column.name: _value(column, side)
        for column in table.columns
        if not (column.primary_key and column.name == "id")
    }


def _value(column: Any, side: Side) -> Any:
    targets = {key.column.table.name for key in column.foreign_keys}
    if targets or column.name in ("project", "run_id"):
        known = {"runs": side.runs[0], "users": side.owner.id, "projects": side.project}
        target = next(iter(targets), {"project": "projects", "run_id": "runs"}.get(column.name))
        return known.get(str(target), 1)
    if column.name == "upload":
        return side.upload
    if column.name in ("project",):
        return side.project
    if column.name in WORDS:
        return WORDS[column.name]
    if column.name in ("ended_at", "resolved_at", "read_at", "acknowledged_at"):
        return None
    if isinstance(column.type, Boolean):
        return False
    if isinstance(column.type, Integer):
        return 1
    if isinstance(column.type, JSON):
        return []
    if isinstance(column.type, LargeBinary):
        return zlib.compress(side.mark.encode())
    return 1.0 if column.type.python_type is float else f"{side.mark} {column.name}"
