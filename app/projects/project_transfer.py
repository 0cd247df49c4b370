"""Where runs and sweeps may be moved to."""

from sqlalchemy.orm import Session

from app.auth.authentication import Principal
from db.access import projects
from db.access.permissions import Permission


def elsewhere(session: Session, principal: Principal, project: str) -> list[str]:
    """The other projects that a visitor may move something into, if out of this one as well."""
    if not principal.grants.may(Permission.MOVE_RUN, project):
        return []
    seen = (each.name for each in projects.listed(session, principal.grants.projects))
    return [each for each in principal.destinations(seen) if each != project]
