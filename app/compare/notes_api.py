"""The note on a project, or on runs side by side; a run has its own."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.compare.notes import subject_of
from app.dependencies import Db
from app.http.parameters import Body, Text, flaw
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import notes

router = APIRouter(prefix="/notes", tags=["runs"])

Project = Annotated[
    Text | None, Field(description="'' is the one that there always is; null: on runs")
]
Runs = Annotated[Text, Field(description="Numbers with commas between them, in whatever order")]


class Note(BaseModel):
    """A text in Markdown; empty where there is no note."""

    note: str


class NoteWanted(Body):
    """What a note on a project, or on runs, shall be; an empty one takes it away."""

    note: str
    project: Project = None
    runs: Runs = ""
    seen: Annotated[
        str | None,
        Field(description="What it was to whoever wrote this: 409 if it is another; null: any"),
    ] = None


@router.get("")
@requires(SIGNED_IN)
def read_note(
    session: Db,
    _principal: SignedIn,
    project: Annotated[Text | None, Query()] = None,
    runs: Annotated[Text, Query()] = "",
) -> Note:
    """Read the note on a project, or on these runs side by side."""
    subject, _page = subject_of(session, Permission.VIEW_RUN, project, runs)
    return Note(note=notes.read(session, subject))


@router.put("")
@requires(SIGNED_IN)
@audited("project", "runs")
def write_note(wanted: NoteWanted, session: Db, principal: SignedIn) -> Note:
    """Put a text in a note's place. For who may submit to the project, or to that of each run."""
    subject, _page = subject_of(session, Permission.SUBMIT_RUN, wanted.project, wanted.runs)
    if wrong := flaw(wanted.note):
        raise Invalid({"note": wrong})
    seen = notes.read(session, subject) if wanted.seen is None else wanted.seen
    notes.write(session, principal.user, subject, wanted.note, seen)
    session.flush()
    return Note(note=notes.read(session, subject))
