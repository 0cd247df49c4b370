"""Pages of reports: list, report, editor, and the form that adds a panel."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Form, Query
from fastapi.responses import HTMLResponse, Response

from app.auth.audit import audited, unaudited
from app.auth.permissions import ANY_SUBMITTER, SIGNED_IN
from app.auth.project_parameters import VisibleProject
from app.auth.routing import Router
from app.compare.comparison import AXES, SERIES
from app.compare.shared_links_pages import report_sharing_panel
from app.dependencies import Posted
from app.html.rendering import CHANGED_MEANWHILE, Context
from app.http.list_pages import After
from app.http.parameters import FormText, RowId, Text
from app.reports import blocks, report_html
from app.reports.blocks import Panel
from app.reports.reports import (
    append,
    check_deletable,
    content_of,
    create,
    may_delete,
    writable,
)
from app.submission.submission import may_submit_to
from db.access import projects
from db.errors import Changed, Invalid
from db.runs import reports
from db.runs.reports import LENGTHS
from db.tables import Report, User

router = Router(prefix="/reports")

PAGE_SIZE = 50
#: Reports that the form to add a panel offers.
MOST_OFFERED = 200
#: Title of a report that was created without one.
UNTITLED = "Untitled report"
#: Keys of a panel that its form has, as `panel_KEY` each.
PANEL_KEYS = ("runs", "metrics", "title", "x", "smoothing", "y")
EMPTY_PANEL = {"kind": "panel", **{f"panel_{key}": "" for key in PANEL_KEYS}}


@router.get("", SIGNED_IN)
def list_reports(context: Context, project: VisibleProject, after: After = "") -> HTMLResponse:
    """List the reports of one visible project, or of all."""
    session, principal = context.session, context.principal
    names = [project.name for project in projects.list_projects(session, principal.grants.projects)]
    only = None if project is None else [project]
    listed = reports.list_reports(session, only, after=after, limit=PAGE_SIZE)
    return context.render(
        "reports/reports.html",
        rows=listed.rows,
        total=listed.total,
        next=listed.next,
        projects=names,
        project=project,
        writable=may_submit_to(session, principal.grants),
    )


@router.get("/new", ANY_SUBMITTER)
def new_report(
    context: Context,
    project: VisibleProject,
    runs: Text = "",
    metrics: Annotated[list[Text], Query()] = [],  # noqa: B006 - FastAPI copies it
    x: Text = "step",
    smoothing: Text = "",
) -> HTMLResponse:
    """Show the form of a new report, or the form to add a panel of these runs to a report."""
    values = {"project": project or "", "panel_runs": runs, "panel_metrics": ", ".join(metrics)}
    values |= {"panel_x": x, "panel_smoothing": smoothing}
    return _new(context, values)


@router.post("", ANY_SUBMITTER)
@audited("report", "title", "project", "panel_runs")
def add(context: Context, posted: Posted) -> Response:
    """Create a report or add a panel to one."""
    values = {
        name: str(posted.get(name, "")) for name in ("report", "title", "project", *EMPTY_PANEL)
    }
    try:
        panel = _parse_panel(values) if values["panel_runs"].strip() else None
        if panel and values["report"].isdecimal() and len(values["report"]) < 10:
            report = append(context.session, context.user, int(values["report"]), panel)
            return context.redirect(f"/reports/{report.id}", "The panel is added.")
        content = content_of(values["title"].strip() or UNTITLED, panel.block if panel else "")
        report = create(context.session, context.user, values["project"], content)
    except Invalid as error:
        return _new(context, values, error.errors)
    return context.redirect(f"/reports/{report.id}/edit", "The report is created.")


@router.get("/{report_id}", SIGNED_IN)
def show_report(report_id: RowId, context: Context) -> HTMLResponse:
    """Show a report, with live panels."""
    session, principal = context.session, context.principal
    report = reports.get(session, report_id)
    drawn = report_html.draw(session, context.settings, report.text)
    return context.render(
        "reports/report.html",
        report=report,
        drawn=drawn,
        author=session.get_one(User, report.user_id).name,
        editor=session.get_one(User, report.editor_id).name,
        may_write=report.project in may_submit_to(session, principal.grants),
        may_delete=may_delete(report, principal.grants),
        sharing=report_sharing_panel(session, principal, report),
    )


@router.get("/{report_id}/edit", SIGNED_IN)
def edit_report(report_id: RowId, context: Context) -> HTMLResponse:
    """Show the editor of a report with its preview."""
    report = writable(context.session, report_id)
    values = {"title": report.title, "text": report.text, "version": str(report.version)}
    drawn = report_html.draw(context.session, context.settings, report.text)
    return _editor(context, report, values, drawn=drawn)


@router.post("/{report_id}", SIGNED_IN)
@audited("title", "version")
def save_report(
    report_id: RowId,
    context: Context,
    title: Annotated[str, Form()] = "",
    text: Annotated[str, Form()] = "",
    version: FormText = "",
) -> Response:
    """Save a report, or show the editor with its errors."""
    report = writable(context.session, report_id)
    values = {"title": title, "text": text, "version": version}
    drawn = report_html.draw(context.session, context.settings, text[: LENGTHS["text"]])
    try:
        content = content_of(title, text)
        seen = int(version) if version.isdecimal() and len(version) < 10 else 0
        reports.edit(context.session, report_id, context.user, content, version=seen)
    except Invalid as error:
        return _editor(context, report, values, error.errors, drawn=drawn)
    except Changed:
        values["version"] = str(report.version)
        errors = {"text": CHANGED_MEANWHILE}
        return _editor(context, report, values, errors, others=report.text, drawn=drawn)
    return context.redirect(f"/reports/{report_id}", "The report is saved.")


@router.post("/{report_id}/cancellation", SIGNED_IN)
def cancel_editing(report_id: RowId, context: Context) -> Response:
    """Return to the report as it was saved. A new one without content is deleted permanently."""
    report = writable(context.session, report_id, lock=True)
    if (report.title, report.text) == (UNTITLED, ""):
        check_deletable(context.session, report_id, context.principal.grants)
        reports.delete(context.session, report_id)
        reports.erase(context.session, report_id)
        return context.redirect("/reports", "The empty report is deleted.")
    return context.redirect(f"/reports/{report_id}")


@router.post("/{report_id}/preview", SIGNED_IN)
@unaudited("Shows a preview: nothing is stored.")
def preview(report_id: RowId, context: Context, posted: Posted) -> Response:
    """Show the editor with a preview, or with a panel added to its text."""
    report = writable(context.session, report_id)
    values = {
        name: str(posted.get(name, "")) for name in ("title", "text", "version", *EMPTY_PANEL)
    }
    errors: dict[str, str] = {}
    if posted.get("action") == "add":
        try:
            panel = _parse_panel(values)
            values |= EMPTY_PANEL
            values["text"] = f"{values['text'].rstrip()}\n\n{panel.block}\n".lstrip()
        except Invalid as error:
            errors = error.errors
    text = values["text"][: LENGTHS["text"]]
    drawn = report_html.draw(context.session, context.settings, text)
    return _editor(context, report, values, errors, drawn=drawn)


@router.post("/{report_id}/deletion", SIGNED_IN)
def delete_report(report_id: RowId, context: Context) -> Response:
    """Move a report to the trash."""
    check_deletable(context.session, report_id, context.principal.grants)
    report = reports.delete(context.session, report_id)
    text = f"The report {report.title} is in the trash, where it can be restored."
    return context.redirect("/reports", text)


@router.post("/{report_id}/restoration", SIGNED_IN)
def restore_report(report_id: RowId, context: Context) -> Response:
    """Restore a report from the trash."""
    check_deletable(context.session, report_id, context.principal.grants)
    reports.restore(context.session, report_id)
    return context.redirect(f"/reports/{report_id}", "The report is restored.")


@router.post("/{report_id}/erasure", SIGNED_IN)
def erase_report(report_id: RowId, context: Context) -> Response:
    """Delete a report in the trash permanently."""
    check_deletable(context.session, report_id, context.principal.grants)
    reports.erase(context.session, report_id)
    return context.redirect("/trash", "The report is being deleted permanently.")


def _parse_panel(values: Mapping[str, str]) -> Panel:
    """Return the panel of a form. Raises Invalid, with the names of the form's fields."""
    kind = "runs" if values["kind"] == "runs" else "panel"
    fields = {key: " ".join(values[f"panel_{key}"].split()) for key in PANEL_KEYS}
    if kind == "runs":
        fields = {"runs": fields["runs"], "title": fields["title"], "columns": fields["metrics"]}
    panel = blocks.read(kind, fields)
    if panel.errors:
        names = {"columns": "panel_metrics"}
        raise Invalid({names.get(key, f"panel_{key}"): text for key, text in panel.errors.items()})
    return panel


def _new(
    context: Context, values: Mapping[str, str], errors: Mapping[str, str] | None = None
) -> HTMLResponse:
    session = context.session
    names = may_submit_to(session, context.principal.grants)
    has_panel = bool(values.get("panel_runs"))
    offered = reports.list_reports(session, names, limit=MOST_OFFERED).rows if has_panel else []
    return context.render(
        "reports/new_report.html",
        values={**EMPTY_PANEL, "report": "", "title": "", **values},
        errors=errors,
        projects=names,
        reports=[row[0] for row in offered],
        axes=AXES,
        series=SERIES,
        most=LENGTHS,
        untitled=UNTITLED,
    )


def _editor(
    context: Context,
    report: Report,
    values: Mapping[str, str],
    errors: Mapping[str, str] | None = None,
    **more: Any,
) -> HTMLResponse:
    ids = {run_id for panel in blocks.panels_of(values["text"]) for run_id in panel.run_ids}
    runs, _deleted = reports.drawn(context.session, ids)
    return context.render(
        "reports/edit_report.html",
        run_names={run_id: run.name for run_id, run in runs.items()},
        report=report,
        values={**EMPTY_PANEL, **values},
        errors=errors,
        axes=AXES,
        series=SERIES,
        most=LENGTHS,
        untitled=UNTITLED,
        **{"others": "", **more},
    )
