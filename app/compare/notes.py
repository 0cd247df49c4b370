"""Subjects of notes on projects and comparisons, with permission checks."""

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
from app.compare import comparison
from app.http.parameters import as_run_ids
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import notes, runs


def subject_of(
    session: Session, permission: Permission, project: str | None, run_ids: str = ""
) -> tuple[str, str]:
    """Return the subject of a note, a project or runs, and the path of its page.

    permission: required in the project of each run.  project: resolved.  run_ids: comma-separated.
    Raises NotFound, Forbidden, Invalid.
    """
    if project is not None and run_ids:
        raise Invalid({"runs": f"{run_ids[:100]!r} and a project; allowed: one of the two"})
    if project is not None:
        return notes.of_project(project), "/projects"
    ids = as_run_ids("runs", run_ids, most=comparison.MOST_RUNS)
    for name in {runs.get(session, run_id).project for run_id in ids}:
        check_project(session, permission, name)
    return notes.of_runs(ids), f"/compare?runs={','.join(map(str, ids))}"
