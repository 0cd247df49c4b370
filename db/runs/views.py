"""Saved views: a user's filters, sort orders, columns and groupings of the run list."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.access import permissions
from db.errors import Invalid, NotFound
from db.names import check_name
from db.tables import SavedView, User

MOST, NAME_CHARACTERS = 50, 60


def list_views(session: Session, user: User) -> Sequence[SavedView]:
    """List a user's own views by name; none for a token limited to one project."""
    grants = permissions.limits(session)
    if grants is not None and grants.only is not None:
        return ()
    mine = select(SavedView).where(SavedView.user_id == user.id).order_by(SavedView.name)
    return session.scalars(mine.limit(MOST)).all()


def save(
    session: Session,
    user: User,
    name: str,
    *,
    filter: str,  # noqa: A002 - named as in the URL
    sort: str,
    columns: str,
    group: str = "",
) -> SavedView:
    """Save a view, replacing the user's view of the same name. Raises Invalid."""
    name = check_name(name, most=NAME_CHARACTERS)
    # Of two concurrent saves, the second waits.
    session.execute(select(User.id).where(User.id == user.id).with_for_update(key_share=True))
    of_user = SavedView.user_id == user.id
    view = session.scalar(select(SavedView).where(of_user, SavedView.name == name))
    if view is None:
        if (session.scalar(select(func.count()).where(of_user)) or 0) >= MOST:
            raise Invalid({"name": f"you have {MOST} views, the maximum"})
        view = SavedView(user_id=user.id, name=name)
        session.add(view)
    view.filter, view.sort, view.columns, view.group = filter, sort, columns, group
    session.flush()
    return view


def delete(session: Session, user: User, view_id: int) -> SavedView:
    """Delete one of a user's own views and return it. Raises NotFound."""
    view = session.get(SavedView, view_id)
    if view is None or view.user_id != user.id:
        raise NotFound(f"You have no view {view_id}.")
    session.delete(view)
    return view
