"""Page to edit the note on a project or on a comparison of runs."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import Form
from fastapi.responses import HTMLResponse, Response

from app.auth.audit import audited
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import form_project, query_project
from app.auth.routing import Router
from app.compare.comparison import MOST_RUNS
from app.compare.notes import subject_of
from app.html.rendering import CHANGED_MEANWHILE, Context
from app.http.parameters import FormText, Text, as_run_ids, flaw
from db.access.permissions import Permission
from db.errors import Changed, Invalid
from db.runs import notes
from db.runs.run_metadata import LENGTHS

router = Router(prefix="/notes")


@router.get("", SIGNED_IN)
def edit_note(
    context: Context,
    project: Annotated[str | None, query_project(Permission.SUBMIT_RUN)],
    runs: Text = "",
) -> HTMLResponse:
    """Show the form to edit the note of a project, or of a comparison of runs."""
    subject, back = subject_of(context.session, Permission.SUBMIT_RUN, project, runs)
    text = notes.read(context.session, subject)
    return _page(context, project, runs, back, text=text, seen=text)


@router.post("", SIGNED_IN)
@audited("project", "runs")
def write_note(
    context: Context,
    project: Annotated[str | None, form_project(Permission.SUBMIT_RUN)],
    runs: FormText = "",
    note: Annotated[str, Form()] = "",
    seen: Annotated[str, Form()] = "",
) -> Response:
    """Save a note, or show the form with its errors."""
    subject, back = subject_of(context.session, Permission.SUBMIT_RUN, project, runs)
    problem = flaw(note)
    try:
        if not problem:
            notes.write(context.session, context.user, subject, note, seen)
            return context.redirect(back, "The note is saved.")
    except Invalid as error:
        problem = error.errors["note"]
    except Changed:
        seen = notes.read(context.session, subject)
        problem = CHANGED_MEANWHILE
        return _page(context, project, runs, back, note, seen, problem, others=seen)
    return _page(context, project, runs, back, note, seen, problem)


def _page(
    context: Context,
    project: str | None,
    typed: str,
    back: str,
    text: str,
    seen: str,
    problem: str = "",
    others: str = "",
) -> HTMLResponse:
    return context.render(
        "compare/note.html",
        status_code=422 if problem else 200,
        project=project,
        runs=typed,
        back=back,
        text=text,
        seen=seen,
        problem=problem,
        others=others,
        # Images are files of the first run, or an artifact of the project.
        images=f"/projects?{urlencode({'project': project})}"
        if project is not None
        else f"/runs/{as_run_ids('runs', typed, most=MOST_RUNS)[0]}",
        most=LENGTHS["note"],
    )
