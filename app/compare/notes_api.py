"""Routes of notes on projects and comparisons; a run's note is part of the run."""

from typing import Annotated

from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import VisibleProject, in_project
from app.auth.routing import Router
from app.compare.notes import subject_of
from app.dependencies import Db
from app.http.parameters import Body, Text, flaw
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import notes

router = Router(prefix="/notes", tags=["runs"])

Project = Annotated[
    Text | None, Field(description="'' is the Default project; null: the note is on runs")
]
Runs = Annotated[Text, Field(description="Comma-separated run ids, in any order")]


class Note(BaseModel):
    """A note in Markdown; empty if there is none."""

    note: str


class NewNote(Body):
    """New text of a note on a project or on runs; an empty text deletes the note."""

    note: str
    project: Project = None
    runs: Runs = ""
    seen: str | None = None
    """Text before the edit: 409 if it has changed since; null: no check"""


@router.get("", SIGNED_IN)
def read_note(session: Db, project: VisibleProject, runs: Text = "") -> Note:
    """Return the note on a project, or on a comparison of runs."""
    subject, _page = subject_of(session, Permission.VIEW_RUN, project, runs)
    return Note(note=notes.read(session, subject))


@router.put("", SIGNED_IN)
@audited("project", "runs")
def write_note(
    body: Annotated[NewNote, in_project(NewNote, Permission.SUBMIT_RUN)],
    session: Db,
    principal: SignedIn,
) -> Note:
    """Replace a note. Requires permission to submit to the project, or to that of each run."""
    subject, _page = subject_of(session, Permission.SUBMIT_RUN, body.project, body.runs)
    if wrong := flaw(body.note):
        raise Invalid({"note": wrong})
    seen = notes.read(session, subject) if body.seen is None else body.seen
    notes.write(session, principal.user, subject, body.note, seen)
    session.flush()
    return Note(note=notes.read(session, subject))
