"""Notes on projects and on runs side by side: what one is on, for who may read or write it."""

from sqlalchemy.orm import Session

from app.auth.permissions import check_project
from app.compare import comparison
from app.http.parameters import as_run_ids
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.runs import notes, runs


def subject_of(
    session: Session, permission: Permission, project: str | None, typed: str = ""
) -> tuple[str, str]:
    """Return what a note is on, a project or runs, and the page that shows it.

    right: that is asked for in the project, or in that of each of the runs.  typed: the runs, with
    commas between them. Raises NotFound, Forbidden, Invalid.
    """
    if project is not None and typed:
        raise Invalid({"runs": f"{typed[:100]!r} beside a project; allowed: one of the two"})
    if project is not None:
        check_project(session, permission, project)
        return notes.of_project(projects.get(session, project).name), "/projects"
    ids = as_run_ids("runs", typed, most=comparison.MOST_RUNS)
    for name in {runs.get(session, run_id).project for run_id in ids}:
        check_project(session, permission, name)
    return notes.of_runs(ids), f"/compare?runs={','.join(map(str, ids))}"
