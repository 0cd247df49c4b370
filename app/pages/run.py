"""The page of one run."""

import shlex
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from app import command_lines, comparison, schemas
from app.auth import SignedIn
from app.context import Db, TheSettings
from app.news import by_step, labels_mark, skipped_steps, waiting_mark
from app.parameters import RunId
from app.rendering import page
from app.summary import summarise
from db import (
    artifacts,
    checkpoints,
    findings,
    histograms,
    history,
    ingest,
    runs,
    series,
    sweeps,
    windows,
    workers,
)
from db.errors import NotFound
from db.spikes import spikes
from db.tables import RECIPE, Run
from halfstep import command_line

router = APIRouter()

LOG_LINES_SHOWN = 1000


@router.get("/runs/{run_id}")
def show_run(
    run_id: RunId, request: Request, session: Db, settings: TheSettings, visitor: SignedIn
) -> HTMLResponse:
    """Show all there is of a run; the browser goes on from the cursor of this moment."""
    run, owner = runs.get_with_owner(session, run_id)
    return page(
        request,
        "run.html",
        visitor=visitor,
        run=summarise(session, run, owner, settings),
        trial=sweeps.of_run(session, run_id),
        cursor=history.cursor_now(session, run, waiting=waiting_mark(session, run, settings)),
        statuses=runs.statuses(session, run_id),
        last=runs.last_change(session, run_id),
        skipped=skipped_steps(session, run_id),
        spikes=spikes(session, run_id),
        findings=findings.of_run(session, run),
        histogram=histograms.newest(session, run_id),
        layers=histograms.newest(session, run_id, "layer_norms"),
        headroom=histograms.headroom(session, run_id),
        updates=histograms.updates(session, run_id),
        weights=histograms.newest(session, run_id, "weights"),
        artifacts=by_step(artifacts.of_run(session, run_id)),
        files=checkpoints.of_run(session, run_id),
        saves=checkpoints.saves(session, run_id),
        forks=runs.forks(session, run_id),
        note=run.note,
        labels_mark=labels_mark(run),
        metrics=windows.measured(session, run_id),
        comparison=comparison.of_group(session, run.group_id, settings) if run.group_id else None,
        log=series.log_lines(session, run_id, most=LOG_LINES_SHOWN),
        config=run.config,
        meant=run.settings,
        watched=ingest.attempt_of(session, run),
        command=_command(run),
        variants=comparison.variants(session, run) if run.source == RECIPE else (),
        settings_rows=_settings_rows(session, run),
    )


def _is_changed(run: Run, field: schemas.Property, value: Any) -> bool:
    """Tell whether a value is not the default; a command's parameter may have none."""
    has_default = run.command is None or "default" in field.schema
    return has_default and bool(value != field.default)


def _command(run: Run) -> dict[str, Any] | None:
    """Return what a page says of a command; of secrets it has names alone."""
    if run.command is None:
        return None
    said = run.command
    facts = [
        ("Command line", said["line"]),
        ("Repository", said["git"]),
        ("Commit", said["commit"]),
        ("Folder", said["folder"]),
        ("Virtual environment", said["venv"]),
        *((f"Variable {name}", value) for name, value in said["variables"].items()),
        ("Secrets", ", ".join(said["secrets"])),
    ]
    words = command_line.filled(said["line"], run.config)
    return {"filled": shlex.join(words), "facts": [each for each in facts if each[1]]}


def _settings_rows(session: Session, run: Run) -> list[dict[str, Any]]:
    """Return the configuration field by field, beside the defaults if the recipe is known."""
    try:
        schema = (
            command_lines.schema(run.command["parameters"])
            if run.command
            else workers.recipe(session, run.recipe)["schema"]
        )
    except NotFound:
        schema = {}
    known = {field.path: field for field in schemas.properties(schema)}
    rows = []
    for path, value in schemas.flat(run.config):
        field = known.get(path)
        rows.append(
            {
                "path": path,
                "title": field.title if field else path,
                "value": value,
                "default": field.default if field else None,
                "is_changed": field is None or _is_changed(run, field, value),
            }
        )
    return rows
