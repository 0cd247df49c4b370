"""Arrangements of charts by users: the panels of each recipe, and the toolbar."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.tables import ChartPreferences, User

#: Scopes: the toolbar of all charts, and the panels of a recipe.
TOOLBAR, PANELS = "toolbar", "panels:"
#: Limit per user; the oldest are deleted.
MOST = 200


def read(session: Session, user: User, scope: str) -> dict[str, Any] | None:
    """Return what was written last for a scope; None if nothing was."""
    row = session.get(ChartPreferences, (user.id, scope))
    return row.content if row else None


def write(session: Session, user: User, scope: str, content: Mapping[str, Any]) -> None:
    """Replace the content of a scope."""
    # Of two concurrent requests, the second waits.
    session.execute(select(User.id).where(User.id == user.id).with_for_update(key_share=True))
    row = session.get(ChartPreferences, (user.id, scope), populate_existing=True)
    if row is None:
        row = ChartPreferences(user_id=user.id, scope=scope)
        session.add(row)
    row.content = dict(content)
    session.flush()
    mine = select(ChartPreferences.scope).where(ChartPreferences.user_id == user.id)
    oldest = mine.order_by(ChartPreferences.changed_at.desc(), ChartPreferences.scope).offset(MOST)
    if surplus := session.scalars(oldest.limit(MOST)).all():
        of_user = ChartPreferences.user_id == user.id
        session.execute(
            delete(ChartPreferences).where(of_user, ChartPreferences.scope.in_(surplus))
        )
