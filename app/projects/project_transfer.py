"""Target projects for moving runs and sweeps."""

from sqlalchemy.orm import Session

from app.auth.authentication import Principal
from db.access import projects
from db.access.permissions import Permission


def elsewhere(session: Session, principal: Principal, project: str) -> list[str]:
    """Return the other projects into which the user may move runs of this project."""
    if not principal.grants.may(Permission.MOVE_RUN, project):
        return []
    seen = (row.name for row in projects.list_projects(session, principal.grants.projects))
    return [name for name in principal.destinations(seen) if name != project]
