"""A valid request for each writing route, made from the OpenAPI schema and the forms' parameters.

A schema cannot state which rows exist, nor which state a route needs: `Rows` and `_fields` do.
"""

import hashlib
import re
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import iter_route_contexts
from PIL import Image
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.datastructures import FormData

from app.http.openapi_docs import describe
from app.submission import config_schema, forms
from app.submission.command_form import parse_search, read_form
from app.sweeps import new_sweep_pages, sweep_submission
from app.sweeps.sweep_submission import SweepSubmission
from db.access import accounts, projects, shared_links
from db.access.permissions import MAINTAINER
from db.database import Database
from db.files import artifact_versions
from db.queue import workers
from db.runs import reports, runs, trash
from db.settings import Settings
from db.sweeps import agent_claims, sweeps
from db.tables import (
    Artifact,
    CheckpointFile,
    Diagnosis,
    Run,
    SavedView,
    Status,
    User,
)
from halfstep.artifacts.manifest import Entry
from halfstep.check.report import as_content
from halfstep.config_groups import RecipeConfig
from halfstep.run_config import config_model
from halfstep.run_config import config_schema as schema_of
from halfstep.telemetry.plain_json import json_safe
from tests.app.checks import checks_made
from tests.app.conftest import CONFIG, CPU, SCHEMA
from tests.app.installation import Side
from tests.db.telemetry.telemetry_made import make_precision_plan


def _one_pixel() -> bytes:
    """Return an image as it is uploaded."""
    file = BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    return file.getvalue()


SAFE = ("GET", "HEAD", "OPTIONS")
AGENT, PASSWORD = "a" * 32, "correct horse battery staple"
CONTENT = b"content"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PNG = _one_pixel()
LINE = b'{"step": 1, "loss": 1}\n'
WEIGHTS = (2).to_bytes(8, "little") + b"{}"


class Own:
    """A recipe with all common settings, also those of measurements."""

    name = "own"
    Config = RecipeConfig
    defaults: dict[str, Any] = {}  # noqa: RUF012


class Snapshot:
    """Rows and files of an installation with SQLite, to be restored before each request."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.database_url.removeprefix("sqlite:///")
        self._data, self._copy = settings.data, settings.data.with_name("copy")
        shutil.copytree(self._data, self._copy)
        self._kept_files = self._files()
        self._kept = sqlite3.connect(":memory:")
        self._reader = sqlite3.connect(self._path)
        self._version = 0
        with closing(sqlite3.connect(self._path)) as source:
            source.backup(self._kept)

    def restore(self) -> None:
        """Restore all rows and files."""
        if self.has_changed():
            with closing(sqlite3.connect(self._path)) as target:
                self._kept.backup(target)
        if self._files() != self._kept_files:
            shutil.rmtree(self._data)
            shutil.copytree(self._copy, self._data)
        self._version = self._data_version()

    def _files(self) -> set[tuple[Path, int, int]]:
        paths = (path for path in self._data.rglob("*") if path.is_file())
        return {(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    def has_changed(self) -> bool:
        """Return whether a transaction has changed a row since the last restore."""
        return self._data_version() != self._version

    def _data_version(self) -> int:
        version: int = self._reader.execute("PRAGMA data_version").fetchone()[0]
        return version


@dataclass(frozen=True)
class Route:
    """One method of one path, with the fields of its form."""

    method: str
    path: str
    endpoint: Any
    form: frozenset[str]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Rows:
    """Rows of a project by the state that a route needs, secrets by name, and the added runs."""

    ids: dict[str, int]
    secrets: dict[str, str]
    runs: list[int]


def writing_routes(app: FastAPI) -> Iterator[Route]:
    """Yield every route that changes data, also those without a sign-in."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if context.path and hasattr(route, "dependant"):
            form = frozenset(
                parameter.alias
                for dependant in dependants(route.dependant)
                for parameter in dependant.body_params
            )
            for method in sorted(route.methods - set(SAFE)):
                yield Route(method, context.path, route.endpoint, form)


def dependants(dependant: Dependant) -> Iterator[Dependant]:
    """Yield the parameters of a route and of its dependencies."""
    yield dependant
    for each in dependant.dependencies:
        yield from dependants(each)


def add_rows(database: Database, side: Side) -> Rows:
    """Add rows of the project's owner in the states that routes need."""
    with database.writing() as session:
        owner = session.get_one(User, side.owner.id)
        owner.password_hash = accounts._passwords.hash(PASSWORD)
        rows = Rows({}, {}, [])
        _add_runs(session, owner, side, rows)
        _add_sweeps(session, owner, side, rows)
        _add_artifact(session, owner, side, rows)
        projects.make(session, f"{side.project}-empty")
        projects.set_role(session, owner, f"{side.project}-empty", MAINTAINER)
        old = reports.Content(f"{side.mark} old", "", [])
        rows.ids["deleted report"] = reports.create(session, owner, side.project, old).id
        reports.delete(session, rows.ids["deleted report"])
        views = select(SavedView.id).where(SavedView.user_id == owner.id)
        rows.ids["view_id"] = session.scalars(views).one()
        rows.secrets["sign-in"] = accounts.make_link_token(session, owner)
        rows.secrets["link"] = shared_links.make(session, owner, side.runs[:1], 7)[0]
    return rows


def _add_runs(session: Session, owner: User, side: Side, rows: Rows) -> None:
    recipe = {"name": "own", "title": "Own", "description": "", "schema": schema_of(Own)}
    offer: dict[str, Any] = {"devices": [CPU], "recipes": [recipe], "versions": {"torch": "2"}}
    workers.register(session, name=f"{side.mark} worker", host="host", pid=2, **offer)
    statuses = {
        "queued": Status.QUEUED,
        "other queued": Status.QUEUED,
        "paused": Status.PAUSED,
        "finished": Status.FINISHED,
        "failed": Status.FAILED,
        "deleted": Status.FINISHED,
        "measured": Status.FINISHED,
        "plan": Status.FINISHED,
    }
    for state, status in statuses.items():
        config = CONFIG
        if state in ("measured", "plan"):
            task = {"lab": {"task": "precision_plan"}} if state == "plan" else {}
            values = {"training": {"steps": 300}} | task
            config = config_model(Own).model_validate(values).model_dump(mode="json")
        name = "digits" if config is CONFIG else "own"
        run = runs.submit(session, owner, Run(recipe=name, config=config, project=side.project))
        run.name = f"{side.mark} {state}"
        run.status = status
        if status == Status.PAUSED:
            run.desired_state = "pause"
        elif status != Status.QUEUED:
            run.ended_at = 1.0
        rows.ids[state] = run.id
        rows.runs.append(run.id)
    for state in ("failed", "measured"):
        about = {"size_bytes": len(CONTENT), "sha256": SHA256, "reason": "interval", "attempt": 1}
        file = CheckpointFile(run_id=rows.ids[state], step=5, kind="checkpoint", **about)
        file.key = f"runs/{rows.ids[state]}/checkpoints/5.pt"
        session.add(file)
    event = json_safe(make_precision_plan())
    session.add(Diagnosis(run_id=rows.ids["plan"], step=0, kind="precision_plan", content=event))
    about = {"size_bytes": len(CONTENT), "sha256": SHA256}
    session.add(Artifact(run_id=side.runs[-1], step=1, name="a.txt", path="a.txt", key="", **about))
    trash.delete(session, rows.ids["deleted"], owner)


def _add_sweeps(session: Session, owner: User, side: Side, rows: Rows) -> None:
    given: dict[str, Any] = {"space": {"lr": [0.1, 0.2]}, "goal": "minimise"}
    given |= {"agents": True, "project": side.project, "name": f"{side.mark} agents"}
    for state in ("agents", "paused sweep"):
        rows.ids[state] = sweep_submission.begin(session, owner, SweepSubmission(**given)).id
    sweeps.pause(session, rows.ids["paused sweep"])
    claimed = agent_claims.take(
        session,
        sweep_submission.lock(session, rows.ids["agents"]),
        owner,
        AGENT,
        next_point=sweep_submission.next_point,
        config_of=lambda _sweep, point: point,
        name_of=str,
    )
    assert claimed is not None
    rows.ids["claimed"] = claimed[0].number
    rows.runs.append(claimed[1].id)


def _add_artifact(session: Session, owner: User, side: Side, rows: Rows) -> None:
    name, entries = f"{side.mark}-pending", [Entry("a.txt", len(CONTENT), SHA256)]
    version = artifact_versions.save(
        session, owner, side.project, name, type="data", entries=entries
    )
    rows.ids["pending"] = version.id
    artifact_versions.set_alias(session, side.ids["version_id"], "old")


#: The first application's schema, since FastAPI takes a second for each equal one.
DESCRIPTION: dict[str, Any] = {}


def request_of(app: FastAPI, route: Route, side: Side, rows: Rows) -> tuple[str, dict[str, Any]]:
    """Return the address and the options of a valid request for rows of a project."""
    known: dict[str, Any] = {"project": side.project, "worker_id": 1, "user_id": side.owner.id}
    own = _fields(side, rows).get(str(route), {})
    known |= {"view_id": rows.ids["view_id"], **side.ids, **_state(route, rows), **own}
    address = re.sub(r"\{(\w+)[^}]*\}", lambda match: str(known[match[1]]), route.path)
    if not route.path.startswith("/api/"):
        shared = {name: known[name] for name in route.form & {"project"}}
        return address, {
            "data": shared | {k: v for k, v in own.items() if f"{{{k}" not in route.path}
        }
    if not DESCRIPTION:
        DESCRIPTION.update(describe(app))
    components = DESCRIPTION["components"]["schemas"]
    path = re.sub(r":\w+}", "}", route.path)
    operation = DESCRIPTION["paths"][path][route.method.lower()]
    options: dict[str, Any] = {
        "params": {
            each["name"]: known.get(each["name"], example(each["schema"], components, known))
            for each in operation.get("parameters", ())
            if each["in"] == "query" and (each["required"] or each["name"] in known)
        }
    }
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        own = own | ({"project": side.project} if own.get("project", "") is not None else {})
        options["json"] = example(content["application/json"]["schema"], components, own)
    elif content or "content" in own:
        options["content"] = own.get("content", CONTENT)
        options["headers"] = {"content-type": next(iter(content), "application/octet-stream")}
    return address, options


def example(schema: Mapping[str, Any], components: Mapping[str, Any], known: Any) -> Any:
    """Return a value that a JSON schema accepts; an object has its required and known fields."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    for word in ("const", "default"):
        if schema.get(word) is not None:
            return schema[word]
    if "enum" in schema:
        return schema["enum"][0]
    if of := schema.get("anyOf") or schema.get("allOf"):
        return example(of[0], components, known)
    if "properties" in schema:
        return {
            name: known[name] if name in known else example(field, components, {})
            for name, field in schema["properties"].items()
            if name in known or name in schema.get("required", ())
        }
    if schema.get("type") == "array":
        return [example(schema["items"], components, {})] * schema.get("minItems", 0)
    if schema.get("type") in ("integer", "number"):
        return max(int(schema.get("minimum", 1)), 1)
    return {"boolean": True, "object": {}, "null": None}.get(schema.get("type", ""), "valid")


#: State of a route's run, by the last part of its path.
STATES = {
    **dict.fromkeys(("place", "priority"), "queued"),
    **dict.fromkeys(("restoration", "erasure"), "deleted"),
    **dict.fromkeys(("project", "deletion", "comparison"), "finished"),
    **{"resumption": "paused", "continuation": "failed", "measurements": "measured"},
}


def _state(route: Route, rows: Rows) -> dict[str, Any]:
    """Return the ids of the rows in the state that a route needs."""
    end = route.path.rpartition("/")[2]
    if "precision-plan" in route.path:
        return {"run_id": rows.ids["plan"]}
    if "/runs/{run_id}" in route.path and (state := STATES.get(end)):
        return {"run_id": rows.ids[state]}
    if str(route) == "DELETE /api/v1/runs/{run_id}":
        return {"run_id": rows.ids["finished"]}
    if "claims" in route.path:
        return {"sweep_id": rows.ids["agents"], "number": rows.ids["claimed"]}
    if "{sweep_id}" in route.path and end == "resumption":
        return {"sweep_id": rows.ids["paused sweep"]}
    if "{report_id}" in route.path and end in ("restoration", "erasure"):
        return {"report_id": rows.ids["deleted report"]}
    return {}


def _fields(side: Side, rows: Rows) -> dict[str, dict[str, Any]]:
    """Return fields of routes that are not in a schema, and those of forms without one."""
    run, watched = side.runs[0], side.runs[-1]
    named = {"name": side.project}
    empty = {"name": f"{side.project}-empty", "new_name": f"{side.project}-renamed"}
    form_of_empty = {"project": empty["name"], "new_name": empty["new_name"]}
    agent = {"agent": AGENT}
    role = {"user": "both", "role": "viewer"}
    scope = {"scope": f"in:{side.project}", "log_days": 7}
    rule = {"condition": "ended", "scope": "project"}
    digits = {"recipe": "digits"}
    settings = {
        field.path: forms.input_text(field.default) for field in config_schema.properties(SCHEMA)
    }
    sweep = {**digits, "space": {"training.batch_size": [8, 16]}, "goal": "minimise"}
    panel = {"kind": "panel", "panel_runs": str(run), "panel_metrics": "loss"}
    attempt = {"run_id": watched, "attempt": 1, "sequence": 0, "offset": 0}
    version = {"version_id": rows.ids["pending"]}
    channel = {"kind": "webhook", "name": "valid", "address": "https://8.8.8.8/valid"}
    file = {"path": "a.txt", "size_bytes": len(CONTENT), "sha256": SHA256}
    report = {"title": "valid", "text": "valid", "version": 1}
    place = {"priority": "0", "nodes": "1", "devices_per_node": "1", "project": side.project}
    command = {**place, "command.line": "python train.py"}
    form_of_sweep = {**place, "at_once": "1", "goal": "minimise", "seed": "0"}
    sweep_of_recipe = {**digits, **form_of_sweep, **settings, "training.batch_size": "8, 16"}
    typed = new_sweep_pages._read_fields(SCHEMA, FormData(sweep_of_recipe))
    sweep_of_command = {
        **command,
        **form_of_sweep,
        "command.line": "python train.py {lr}",
        "parameter.lr.kind": "number",
        "parameter.lr.value": "0.1, 0.2",
    }
    line, _, space, _ = parse_search(read_form(FormData(sweep_of_command), {}))
    values = new_sweep_pages.read_plan(FormData(form_of_sweep))
    plan = new_sweep_pages.plan(values)
    submissions = [
        new_sweep_pages._submission("digits", SCHEMA, typed, values),
        SweepSubmission(command=line, space=space, **plan),
        SweepSubmission(agents=True, space={"lr": "0.1, 0.2"}, **plan),
    ]
    confirmed = [{"confirmed": sweep_submission.confirmation_of(each, 2)} for each in submissions]
    return {
        "POST /api/v1/runs": digits,
        "PATCH /api/v1/runs/{run_id}": {"note": "valid", "name": "valid"},
        "PUT /api/v1/runs/{run_id}/place": {"before_id": rows.ids["other queued"]},
        "POST /api/v1/runs/bulk": {"action": "move", "runs": [rows.ids["finished"]]},
        "POST /api/v1/sweeps": sweep,
        "POST /api/v1/sweeps/agents": {"space": {"lr": [0.1, 0.2]}, "goal": "minimise"},
        "POST /api/v1/sweeps/{sweep_id}/claims": agent,
        "PUT /api/v1/sweeps/{sweep_id}/claims/{number}": agent,
        "POST /api/v1/sweeps/{sweep_id}/claims/{number}/end": agent,
        "POST /api/v1/sweeps/{sweep_id}/claims/{number}/return": agent,
        "POST /api/v1/sweeps/{sweep_id}/extension": {"space": {"training.batch_size": [32]}},
        "PUT /api/v1/sweeps/{sweep_id}/metric": {"metric": "loss"},
        "POST /api/v1/presets": digits,
        "PUT /api/v1/notes": {"note": "valid"},
        "PUT /api/v1/reports/{report_id}": report,
        "POST /api/v1/checks": {"report": as_content(checks_made.report()), "sources": {}},
        "POST /api/v1/ingest": {"id": AGENT, "attempt": 1, "started": "2026-01-02T03:04:05Z"},
        "PUT /api/v1/ingest/{run_id}/{attempt}/{sequence}": attempt,
        "PUT /api/v1/ingest/{run_id}/{attempt}/sidecar/{sequence}": attempt,
        "PUT /api/v1/ingest/{run_id}/{attempt}/files/{path:path}": {
            **attempt,
            **{"path": "a.txt", "size": len(CONTENT), "sha256": SHA256},
        },
        "POST /api/v1/ingest/{run_id}/{attempt}/source": {**attempt, "source": "print(1)"},
        "POST /api/v1/ingest/{run_id}/{attempt}/end": {**attempt, "status": "finished", "step": 1},
        "POST /api/v1/ingest/{run_id}/log": {
            "run_id": watched,
            "content": b'{"step": 1, "loss": 1}\n',
        },
        "PUT /api/v1/uploads/{name:path}": {"name": "valid.safetensors", "content": WEIGHTS},
        "POST /api/v1/artifacts": {"name": "valid", "files": [file]},
        "PUT /api/v1/artifact-versions/{version_id}/blobs/{sha256}": {
            **version,
            **{"sha256": SHA256, "size": len(CONTENT), "offset": 0},
        },
        "PUT /api/v1/artifact-versions/{version_id}/aliases/{alias}": {"alias": "best"},
        "DELETE /api/v1/artifacts/{collection_id}/aliases/{alias}": {"alias": "old"},
        "DELETE /api/v1/artifact-versions/{version_id}": version,
        "POST /api/v1/runs/{run_id}/images": {"content": PNG},
        "POST /api/v1/reports/{report_id}/images": {"content": PNG},
        "POST /api/v1/projects/images": {"content": PNG},
        "PUT /api/v1/secrets/{name}": {"name": "VALID", "value": "valid secret"},
        "DELETE /api/v1/secrets/{name}": {"name": f"{side.mark} name"},
        "PATCH /api/v1/users/{user_id}": {"change": "no-commands"},
        "PATCH /api/v1/projects": named,
        "PATCH /api/v1/projects/name": empty,
        "DELETE /api/v1/projects": empty,
        "PUT /api/v1/projects/quota": named,
        "PUT /api/v1/projects/roles": role,
        "DELETE /api/v1/projects/roles": role,
        "PUT /api/v1/retention": scope,
        "DELETE /api/v1/retention": scope,
        "POST /api/v1/links": {"runs": [run]},
        "POST /api/v1/alerts/rules": rule,
        "POST /api/v1/runs/{run_id}/alerts": {"condition": "ended"},
        "POST /api/v1/alerts/channels": channel,
        "POST /": {"token": rows.secrets["sign-in"]},
        "POST /sign-in": {"name": side.owner.name, "password": PASSWORD},
        "POST /runs/new": digits | {"other": "own"},
        "POST /runs": digits | place | settings,
        "POST /runs/new/command": command,
        "POST /presets": digits | place | settings | {"preset": "valid"},
        "POST /presets/{preset_id}/deletion": {},
        "POST /runs/cancellation": {"run": rows.ids["queued"]},
        "POST /runs/{run_id}/priority": {"priority": "1"},
        "POST /runs/{run_id}/scale": {"scale": "1024"},
        "POST /runs/{run_id}/replays": {"step": "5"},
        "POST /runs/{run_id}/measurements": {"task": "precision_diff"},
        "POST /runs/{run_id}/precision-plan/runs": {"seeds": "1"},
        "POST /runs/{run_id}/comparison": {"seeds": "1", "precision": "fp32"},
        "POST /notes": {"note": "valid", "seen": f"{side.mark} project note"},
        "POST /artifact-versions/{version_id}/alias": {"alias": "best"},
        "POST /artifact-versions/{version_id}/deletion": version,
        "POST /reports": {"title": "valid", "project": side.project} | panel,
        "POST /reports/{report_id}": report,
        "POST /reports/{report_id}/preview": report,
        "POST /sweeps/new": digits,
        "POST /sweeps": sweep_of_recipe | confirmed[0],
        "POST /sweeps/new/command": command,
        "POST /sweeps/command": sweep_of_command | confirmed[1],
        "POST /sweeps/agents": form_of_sweep | {"settings": "lr = 0.1, 0.2"} | confirmed[2],
        "POST /sweeps/{sweep_id}/metric": {"metric": "loss"},
        "POST /sweeps/{sweep_id}/extension": {"setting": "training.batch_size", "more": "32"},
        "POST /secrets": {"name": "VALID", "value": "valid secret"},
        "POST /secrets/{name}/deletion": {"name": f"{side.mark} name"},
        "POST /alerts/rules": rule,
        "POST /runs/{run_id}/alerts": {"condition": "ended"},
        "POST /alerts/rules/{rule_id}/switch": {"on": "1"},
        "POST /alerts/inbox/reading": {"up_to": "1"},
        "POST /alerts/channels": channel,
        "POST /alerts/channels/{channel_id}/switch": {"on": "1"},
        "POST /views": {"name": "valid"},
        "POST /account/password": {"password": f"new {PASSWORD}", "current": PASSWORD},
        "POST /account/tokens": {"name": "valid"},
        "POST /people": {"name": "valid"},
        "POST /people/{user_id}/{change}": {"change": "no-commands"},
        "POST /projects": {"name": "valid"},
        "POST /projects/name": form_of_empty,
        "POST /projects/deletion": form_of_empty,
        "POST /projects/quota": {"share": "1"},
        "POST /projects/roles": role,
        "POST /projects/roles/deletion": role,
        "POST /retention": {"scope": f"in:{side.project}", "log_days": "7"}
        | {"confirmed": "Rules(checkpoint_days=None, log_days=7.0)"},
        "POST /retention/deletion": {"scope": f"in:{side.project}"},
        "POST /links": {"runs": str(run), "days": "7"},
        "POST /shared": {"secret": rows.secrets["link"]},
    }
