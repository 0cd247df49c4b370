"""Markdown notes on projects and on comparisons; a run's note is a column of the run."""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.errors import Changed, Invalid
from db.runs.run_metadata import check_note
from db.tables import Note, User


def of_project(name: str) -> str:
    """Return the subject of a project's note."""
    return f"project:{name}"


def of_runs(run_ids: Iterable[int]) -> str:
    """Return the subject of the note on a comparison of runs, in any order."""
    return f"runs:{','.join(map(str, sorted(set(run_ids))))}"


def read(session: Session, subject: str) -> str:
    """Return a note's text; empty if there is none."""
    note = session.get(Note, subject)
    return note.text if note else ""


def of_projects(session: Session, names: Iterable[str]) -> dict[str, str]:
    """Return the existing notes of these projects by project name."""
    subjects = {of_project(name): name for name in names}
    query = select(Note).where(Note.subject.in_(subjects))
    return {subjects[note.subject]: note.text for note in session.scalars(query)}


def write(session: Session, user: User, subject: str, text: str, seen: str) -> None:
    """Replace the text of a note; an empty text deletes the note.

    seen: the text that the author edited. Raises Invalid, or Changed if the note differs now.
    """
    text, error = check_note(text)
    if error:
        raise Invalid({"note": error})
    note = session.get(Note, subject, with_for_update=True)
    now = note.text if note else ""
    if now not in (check_note(seen)[0], text):
        raise Changed("The note has changed in the meantime. Nothing was saved.")
    if not text:
        if note:
            session.delete(note)
        return
    note = note or Note(subject=subject)
    note.text, note.user_id = text, user.id
    session.add(note)
