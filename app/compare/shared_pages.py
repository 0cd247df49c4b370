"""Pages of a read-only link: a snapshot of its runs, or a report.

The secret is in the fragment of the link, which browsers do not send: the page that it opens posts
the secret, and receives it back as a cookie for the path of the link's runs. So it does not appear
in logs, chat previews or Referer headers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from app.auth.audit import unaudited
from app.auth.authentication import LinkNeeded, check_came_from_here
from app.auth.permissions import SHARED_LINK, access_of, check, requires
from app.compare import comparison
from app.compare.comparison import Comparison
from app.compare.comparison_api import ComparedRun, SeriesOfRuns, drawable_names, series_of
from app.compare.comparison_pages import TheView, template_values
from app.dependencies import Db, TheDatabase, TheSettings
from app.files.image_downloads import send_image
from app.html import chart_links
from app.html.chart_pages import chart
from app.html.markdown import SharedReport
from app.html.rendering import page
from app.http.credentials import cookie_name, is_secure
from app.http.parameters import FormText, Name, RowId, RunId, Step, Text, as_run_ids
from app.live.run_updates import list_skipped_steps
from app.reports import report_html
from app.runs.key_figures import key_figures
from app.runs.stepless_figures import stepless_figures
from app.runs.summary import RunSummary, summarise
from app.telemetry import config_values
from app.telemetry.metric_names import Choice, Chosen, NamedMetrics
from app.telemetry.series_api import (
    MOST_NAMES,
    MOST_POINTS,
    MetricNames,
    MetricSeries,
    SeriesPage,
    page_of_metric_names,
    page_of_series,
    series_of_metrics,
)
from app.telemetry.step_metrics import step_metrics
from db import clock
from db.access import permissions, shared_links
from db.access.permissions import Permission
from db.access.shared_links import Shown
from db.errors import NotFound
from db.files import report_images
from db.health.spikes import spikes
from db.runs import runs
from db.settings import Settings
from db.tables import Report
from db.telemetry import damage, windows

router = APIRouter(prefix="/shared")

TABS = {
    "charts": "Charts",
    "skips": "Skipped steps",
    "metrics": "Metrics",
    "configuration": "Configuration",
    "history": "History",
}
#: Settings of a command that may be confidential.
NOT_SHOWN = ("command", "commit")


def _cookie_of(settings: Settings) -> str:
    return f"{cookie_name(settings)}-link"


def _admit(request: Request, session: Db, settings: TheSettings, link_id: RowId) -> Shown:
    """Authorize the holder of a link, and limit the session to the link's runs."""
    shown = shared_links.find(session, request.cookies.get(_cookie_of(settings), ""))
    is_open = access_of(request.scope["endpoint"]).need == SHARED_LINK
    if shown is None or shown.link.id != link_id or not is_open:
        raise LinkNeeded
    permissions.limit(session, shown.grants)
    if "run_id" in request.path_params:
        check(session, Permission.VIEW_RUN, int(request.path_params["run_id"]))
    return shown


def _whole_runs(shown: Annotated[Shown, Depends(_admit)]) -> Shown:
    """Refuse links to reports, which show of their runs only what the panels do."""
    if shown.report is not None:
        raise NotFound("This link shows a report, and its runs only in the report's panels.")
    return shown


ByLink = Annotated[Shown, Depends(_admit)]
#: For routes that show all of a run.
OfWholeRuns = Annotated[Shown, Depends(_whole_runs)]


@router.get("")
def open_link(request: Request) -> HTMLResponse:
    """Show the page that posts the secret of a link and removes it from the URL."""
    return page(request, "compare/shared_open.html")


@router.post("")
@unaudited("Moves a secret into a cookie: nothing is stored.")
def redeem(
    request: Request, database: TheDatabase, settings: TheSettings, secret: FormText = ""
) -> Response:
    """Move a link's secret, or a pasted link, into a cookie. Can be repeated."""
    check_came_from_here(request)
    secret = secret.strip().rpartition("#")[2]
    with database.reading() as session:  # anonymous requests must not block writers
        shown = shared_links.find(session, secret)
        moment = clock.current(session)
    if shown is None:
        raise LinkNeeded
    link = shown.link
    response = RedirectResponse(f"/shared/{link.id}", status_code=303)
    response.set_cookie(
        _cookie_of(settings),
        secret,
        max_age=int(link.expires_at - moment),
        path=f"/shared/{link.id}",
        httponly=True,
        samesite="lax",
        secure=is_secure(request),
    )
    return response


@router.get("/{link_id}")
@requires(SHARED_LINK)
def show(
    request: Request,
    session: Db,
    settings: TheSettings,
    shown: ByLink,
    view: TheView,
    chosen: Chosen,
) -> HTMLResponse:
    """Show the run, the comparison of the runs, or the report."""
    moment = clock.current(session)
    template, values = "reports/shared_report.html", dict[str, Any]()
    if shown.report is not None:
        values = _report(session, settings, shown, shown.report)
    elif len(shown.runs) == 1:
        template, values = "compare/shared_run.html", _run(session, settings, shown.runs[0], chosen)
    else:
        template, values = (
            "compare/shared_compare.html",
            template_values(session, _compare(session, shown.runs, settings, view.metrics), view),
        )
    return page(request, template, shown=shown, moment=moment, by_link=True, **values)


@router.get("/{link_id}/runs/{run_id}/series")
@requires(SHARED_LINK)
def get_series(
    run_id: RunId,
    session: Db,
    _shown: OfWholeRuns,
    chosen: Chosen,
    first: Step = 1,
    last: Step | None = None,
) -> SeriesPage:
    """Return the data for the charts of the run."""
    return page_of_series(session, run_id, first, last, MOST_POINTS, chosen)


@router.get("/{link_id}/runs/{run_id}/metrics/names")
@requires(SHARED_LINK)
def get_metric_names(
    run_id: RunId, session: Db, _shown: OfWholeRuns, after: Name = ""
) -> MetricNames:
    """Return the names of the run's metrics."""
    return page_of_metric_names(session, [run_id], after, MOST_NAMES)


@router.get("/{link_id}/runs/{run_id}/metrics/series")
@requires(SHARED_LINK)
def get_metric_series(
    run_id: RunId,
    session: Db,
    _shown: OfWholeRuns,
    metric: NamedMetrics,
    first: Step = 1,
    last: Step | None = None,
) -> MetricSeries:
    """Return the data for panels of metrics of the run."""
    return series_of_metrics(session, run_id, metric, first, last)


@router.get("/{link_id}/comparison")
@requires(SHARED_LINK)
def get_comparison(
    session: Db,
    settings: TheSettings,
    shown: OfWholeRuns,
    metric: NamedMetrics = [],  # noqa: B006 - FastAPI copies it
) -> JSONResponse:
    """Return the figures and settings for scatter plots of the runs."""
    compared = _compare(session, shown.runs, settings, metric)
    columns = [
        ComparedRun.model_validate(column, from_attributes=True).model_dump(
            mode="json",
            include={"figures": True, "best": True, "run": {"skipped": True, "step": True}},
        )
        for column in compared.columns
    ]
    return JSONResponse({"runs": columns, "differences": dict(compared.differences)})


@router.get("/{link_id}/comparison/metrics/names")
@requires(SHARED_LINK)
def get_names_of_runs(
    session: Db,
    shown: OfWholeRuns,
    search: Text = "",
    after: Name = "",
    limit: Annotated[int, Query(ge=1, le=MOST_NAMES)] = MOST_NAMES,
) -> MetricNames:
    """Return the names of the metrics that can be drawn of the runs."""
    return drawable_names(session, list(shown.runs), search, after, limit)


@router.get("/{link_id}/comparison/series")
@requires(SHARED_LINK)
def get_series_of_runs(
    session: Db,
    shown: ByLink,
    runs: Annotated[str, Query()],
    series: Annotated[list[Text], Query()],
    first: Step = 1,
    last: Step | None = None,
    points: Annotated[int, Query(ge=32, le=MOST_POINTS)] = 1000,
) -> SeriesOfRuns:
    """Return the data for the charts of the runs."""
    ids = as_run_ids("runs", runs, most=comparison.MOST_RUNS)
    if shown.report is not None:
        ids, series = _drawn(shown.report, ids, series)
    return series_of(session, ids, series, first, last, points)


@router.get("/{link_id}/charts.svg")
@requires(SHARED_LINK)
def show_chart(
    session: Db, shown: ByLink, runs: Text, series: Annotated[Text, Query(max_length=200)] = "loss"
) -> Response:
    """Draw one series or metric of the runs as an image."""
    ids = as_run_ids("runs", runs, most=chart_links.MOST_RUNS)
    names = [series]
    if shown.report is not None:
        ids, names = _drawn(shown.report, ids, names)
    return chart(session, ids if names else [], series)


@router.get("/{link_id}/images/{image_id}")
@requires(SHARED_LINK)
def show_image(image_id: RowId, session: Db, settings: TheSettings, shown: ByLink) -> Response:
    """Return an image of the report."""
    report_id = shown.report.id if shown.report is not None else 0
    return send_image(settings, report_images.get(session, report_id, image_id))


def _drawn(
    report: Report, run_ids: Sequence[int], names: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Return the runs and series among these that some panel of a report draws together.

    A panel's x axis may be a metric, and the examples per second are computed of the time per step.
    """
    drawn = [
        panel
        for panel in report.panels
        if panel["kind"] != "runs" and set(run_ids) <= set(panel["runs"])
    ]
    allowed = {name for panel in drawn for name in (*panel["metrics"], *panel["axes"])}
    if "examples_per_second" in allowed:
        allowed.add("step_us")
    return list(run_ids) if drawn else [], [name for name in names if name in allowed]


def _report(session: Session, settings: Settings, shown: Shown, report: Report) -> dict[str, Any]:
    link = SharedReport(f"/shared/{shown.link.id}", report.id)

    def compare(run_ids: list[int]) -> Comparison:
        return _compare(session, run_ids, settings)

    drawn = report_html.draw(session, settings, report.text, shared=link, compare=compare)
    return {"report": report, "drawn": drawn}


def _run(session: Session, settings: Settings, run_id: int, chosen: Choice) -> dict[str, object]:
    run, owner = runs.get_with_owner(session, run_id)
    last = runs.last_change(session, run_id)
    moment = clock.current(session)
    metric_names = chosen.names(session, run_id)
    measured = windows.measure(session, run_id, names=metric_names.names)
    summary = summarise(session, run, owner, settings)
    damage.note_all([run.damage])
    return {
        "tabs": TABS,
        "tab": next(iter(TABS)),
        "run": _redact(summary),
        "status_seconds": moment - last.time if last else 0.0,
        "statuses": runs.statuses(session, run_id),
        "figures": key_figures(session, run),
        "skipped": list_skipped_steps(session, run_id),
        "spikes": spikes(session, run_id),
        "metrics": measured,
        "stepless": stepless_figures(session, run),
        "metric_names": metric_names,
        "chosen_metrics": chosen,
        "config": run.whole_config,
        "step_metrics": step_metrics(run),
        "training_settings": run.settings,
        "settings": config_values.settings_of(session, run),
        "command": None,
    }


def _compare(
    session: Session, run_ids: Sequence[int], settings: Settings, metrics: Iterable[str] = ()
) -> Comparison:
    compared = comparison.of_runs(session, list(run_ids), settings, metrics)
    return replace(
        compared,
        columns=[replace(column, run=_redact(column.run)) for column in compared.columns],
        settings=[row for row in compared.settings if row[0] not in NOT_SHOWN],
    )


def _redact(run: RunSummary) -> RunSummary:
    """Remove fields that name other runs, workers and their machines."""
    return run.model_copy(
        update={"waiting": None, "waiting_for": [], "ahead": None, "error": None, "workers": []}
    )
