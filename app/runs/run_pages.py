"""Page of a run."""

import shlex

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.auth.permissions import SIGNED_IN
from app.auth.routing import Router
from app.compare import comparison
from app.compare.shared_links_pages import sharing_panel
from app.dependencies import Db
from app.files.file_keys import MEDIA, FileKey, file_keys
from app.html.rendering import Context
from app.http.parameters import RunId
from app.live.run_updates import ARTIFACTS_SHOWN, labels_mark, list_skipped_steps, waiting_mark
from app.projects.project_transfer import elsewhere
from app.runs.chart_preferences_api import preferences
from app.runs.diagnosis_evidence import diagnosis_evidence
from app.runs.key_figures import key_figures, scaler_card
from app.runs.static_charts import static_charts
from app.runs.stepless_figures import SteplessFigures, stepless_figures
from app.runs.summary import RunSummary, summarise
from app.telemetry import config_values, precision_diffs, precision_plans
from app.telemetry.environment import environment_of
from app.telemetry.lab_card import lab_card
from app.telemetry.metric_names import Chosen
from app.telemetry.step_metrics import step_metrics
from app.telemetry.suggested_actions import AdvisedFinding, advise
from db import clock
from db.access.permissions import Permission
from db.files import artifact_versions, artifacts, checkpoints
from db.health import findings
from db.health.spikes import spikes
from db.runs import history, runs
from db.sweeps import sweeps
from db.tables import ENDED, PRECISION_DIFF, PRECISION_PLAN, TRAIN, Run
from db.telemetry import damage, histograms, ingest, series, system, windows
from halfstep.cli import command_line
from halfstep.number_formats import quantity
from halfstep.telemetry.events import SAMPLE_SECONDS

router = Router()

#: Parameters that the view of the charts has in the URL.
VIEW = {"x", "loss", "smooth", "range", "hide", "ylog", "ytrim"}
LOG_LINES_SHOWN = 1000
#: Labels of the tabs by their names in the URL.
TABS = {
    "charts": "Charts",
    "skips": "Skipped steps",
    "gradients": "Gradients",
    "files": "Files",
    "log": "Log",
    "configuration": "Configuration",
    "media": "Media",  # last: it appears with the first file
}
#: Tabs by names that they had.
FORMER_TABS = {"history": "configuration"}


@router.get("/runs/watched/{watch_id}", SIGNED_IN)
def find_watched_run(watch_id: str, session: Db) -> RedirectResponse:
    """Redirect to the page of a watched run by the identifier that its script knows at once."""
    return RedirectResponse(f"/runs/{runs.find_watched(session, watch_id)}", status_code=303)


@router.get("/runs/{run_id}", Permission.VIEW_RUN)
def show_run(run_id: RunId, context: Context, chosen: Chosen) -> HTMLResponse:
    """Show a run; the live stream continues from the cursor on the page."""
    session, principal, settings = context.session, context.principal, context.settings
    run, owner = runs.get_with_owner(session, run_id)
    keys = file_keys(artifacts.newest(session, run_id, most=ARTIFACTS_SHOWN))
    tab = _tab(context.request.query_params.get("tab", ""), keys)
    last = runs.last_change(session, run_id)
    metric_names = chosen.names(session, run_id)
    log = series.log_lines(session, run_id, most=LOG_LINES_SHOWN)
    run_settings = config_values.settings_of(session, run)
    summary = summarise(session, run, owner, settings)
    damage.note_all([run.damage])
    advice = advise(session, run)
    measured = windows.measure(session, run_id, names=metric_names.names)
    arranged = preferences(session, principal.user, run.recipe)
    has_diagnosis = bool(advice) and _has_ended_unwell(summary, advice[0])
    stepless = stepless_figures(session, run)
    charts = None  # no charts in a view that the server does not draw
    if _is_usual_view(context.request, run) and arranged.has_usual_charts:
        charts = static_charts(session, run, is_scaled=summary.is_scaled)
    return context.render(
        "run/run.html",
        may=principal.permissions(run),
        destinations=elsewhere(session, principal, run.project),
        sharing=sharing_panel(session, principal, [run]),
        tabs=_tabs(run, stepless).items(),
        tab=tab if tab in TABS else _first_tab(run, stepless),
        run=summary,
        trial=sweeps.of_run(session, run_id),
        neighbours=_neighbours(session, run_id),
        cursor=history.cursor_now(session, run, waiting=waiting_mark(session, run, settings)),
        statuses=runs.statuses(session, run_id),
        last=last,
        status_seconds=clock.current(session) - last.time if last else 0.0,
        skipped=list_skipped_steps(session, run_id),
        spikes=spikes(session, run_id),
        figures=key_figures(session, run),
        stepless=stepless,
        scaler=scaler_card(session, run),
        preferences=arranged,
        static_charts=charts,
        findings=advice,
        has_diagnosis=has_diagnosis,
        evidence=diagnosis_evidence(session, run) if has_diagnosis else None,
        histogram=histograms.newest(session, run_id),
        layers=histograms.newest(session, run_id, "layer_norms"),
        headroom=histograms.headroom(session, run_id),
        fp8=histograms.newest(session, run_id, "fp8"),
        updates=histograms.updates(session, run_id),
        precision_diff=precision_diffs.table(session, run),
        weights=histograms.newest(session, run_id, "weights"),
        sample_seconds=SAMPLE_SECONDS,
        has_system_samples=system.has_samples(session, run_id),
        keys=keys,
        media=sum(key.kind in MEDIA for key in keys),
        artifacts_shown=ARTIFACTS_SHOWN,
        named_artifacts=artifact_versions.of_run(session, run_id),
        artifacts_total=artifacts.count(session, run_id),
        files=checkpoints.of_run(session, run_id),
        saves=checkpoints.saves(session, run_id),
        forks=runs.forks(session, run_id),
        note=run.note,
        labels_mark=labels_mark(run),
        metrics=measured,
        metric_names=metric_names,
        chosen_metrics=chosen,
        comparison=comparison.of_group(session, run.group_id, settings) if run.group_id else None,
        log_bytes=artifacts.log_bytes(session, run_id),
        has_log=bool(log),
        log=log,
        config=run.whole_config,
        step_metrics=step_metrics(run),
        training_settings=run.settings if run.task == TRAIN else {},
        examples=(run.workload or {}).get("examples"),
        watched=ingest.attempt_of(session, run),
        command=_command(run),
        environment=environment_of(session, run),
        settings=run_settings,
        changed_settings=len(config_values.select_changed(run_settings)),
        most_seeds=comparison.MOST_SEEDS,
        variants=comparison.variants(session, run) if precision_plans.is_measurable(run) else (),
        task=run.task,
        measured=precision_plans.list_measurements(session, run_id),
        lab=lab_card(session, run),
        describe_weights=precision_plans.describe_weights,
        is_measurable=precision_plans.is_measurable(run),
        checkpoint_steps=precision_plans.checkpoint_steps(session, run_id),
    )


def _neighbours(session: Session, run_id: int) -> dict[str, int | None]:
    """Return the visible runs before and after one, by the name of the link to them."""
    visible = select(Run.id).where(Run.deleted_at.is_(None)).limit(1)
    return {
        "prev": session.scalar(visible.where(Run.id < run_id).order_by(Run.id.desc())),
        "next": session.scalar(visible.where(Run.id > run_id).order_by(Run.id)),
    }


def _tab(name: str, keys: list[FileKey]) -> str:
    """Return the name of the tab that a URL names; of a run without media, the files."""
    if name == "media" and not any(key.kind in MEDIA for key in keys):
        return "files"
    return FORMER_TABS.get(name, name)


def _tabs(run: Run, stepless: SteplessFigures | None) -> dict[str, str]:
    """Return the tabs of a run: a measurement has no steps, nor have some commands.

    While such a command runs, tabs of steps are on the page, hidden until the first step.
    """
    of_steps = set() if run.task == TRAIN else {"charts", "skips"}
    if stepless and run.status in ENDED:
        of_steps = {"skips", "gradients"}
    return {name: label for name, label in TABS.items() if name not in of_steps}


def _first_tab(run: Run, stepless: SteplessFigures | None) -> str:
    """Return the tab that is open at first: of a command without numbers, its log."""
    if stepless and not stepless.metrics:
        return "log"
    return {PRECISION_DIFF: "gradients", PRECISION_PLAN: "log"}.get(run.task, next(iter(TABS)))


def _is_usual_view(request: Request, run: Run) -> bool:
    """Return whether the charts open with all steps on the axis of steps, as drawn by the server.

    url_state.js writes the view into the URL.
    """
    if any(metric.is_usual for metric in step_metrics(run)):
        return False
    return not any(name in VIEW or name.startswith("y.") for name in request.query_params)


def _has_ended_unwell(run: RunSummary, finding: AdvisedFinding) -> bool:
    """Return whether an ended run's first finding stands above everything else on its page."""
    if not run.is_over:
        return False
    is_sick = run.health is not None and run.health.word in ("collapsing", "dead")
    is_explained = run.status == "failed" and (
        finding.cause in findings.FATAL or finding.part == "skipped"
    )
    return is_sick or is_explained or run.outcome in ("no_updates", "diverged")


def _command(run: Run) -> dict[str, object] | None:
    """Return the facts of a command for the page; secrets by name only."""
    if run.command is None:
        return None
    command = run.command
    facts = [
        ("Command line", command["line"]),
        ("Repository", command["git"]),
        ("Commit", command["commit"]),
        ("Patch", quantity(patch.count("\n"), "line") if (patch := command.get("patch")) else ""),
        ("Folder", command["folder"]),
        ("Virtual environment", command["venv"]),
        *((f"Variable {name}", value) for name, value in command["variables"].items()),
        ("Secrets", ", ".join(command["secrets"])),
    ]
    argv = command_line.fill_placeholders(command["line"], run.config)
    return {"filled": shlex.join(argv), "facts": [fact for fact in facts if fact[1]]}
