"""Where runs and sweeps may be moved to."""

from sqlalchemy.orm import Session

from app.auth.authentication import Visitor
from db.access import projects
from db.access.permissions import Right


def elsewhere(session: Session, visitor: Visitor, project: str) -> list[str]:
    """The other projects that a visitor may move something into, if out of this one as well."""
    if not visitor.standing.may(Right.MOVE, project):
        return []
    seen = (each.name for each in projects.listed(session, visitor.standing.projects))
    return [each for each in visitor.destinations(seen) if each != project]
