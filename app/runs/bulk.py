"""Bulk actions on runs: each run succeeds or fails by itself."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy.orm import Session

from app.auth.permissions import Forbidden, check
from db.access import projects
from db.access.permissions import Permission
from db.errors import Conflict, Invalid, NotFound
from db.queue import run_control
from db.runs import run_metadata, trash
from db.tables import Run, User

MOST_RUNS = 200


@dataclass(frozen=True)
class Failure:
    """A run for which the action failed, with the reason."""

    id: int
    detail: str


def _restore(session: Session, run_id: int, user: User) -> Run:
    """Restore a run from the trash. Raises Conflict for another run: its id is a typo."""
    run = session.get(Run, run_id)
    if run is not None and run.deleted_at is None:
        raise Conflict(f"Run {run_id} was not in the trash.")
    return trash.restore(session, run_id, user)


#: Actions without a parameter; app.runs.bulk_api has the request.
ACTIONS: dict[str, tuple[Permission, Callable[[Session, int, User], object]]] = {
    "cancel": (Permission.CONTROL_RUN, run_control.cancel),
    "delete": (Permission.DELETE_RUN, trash.delete),
    "restore": (Permission.DELETE_RUN, _restore),
    "erase": (Permission.DELETE_RUN, trash.erase),
}
TAGGING: dict[str, Callable[[Session, int, User, str], object]] = {
    "add_tag": run_metadata.add_tag,
    "remove_tag": run_metadata.remove_tag,
}
MOVE = "move"


def act(
    session: Session,
    user: User,
    action: str,
    run_ids: Collection[int],
    *,
    tag: str = "",
    project: str = "",
) -> tuple[list[int], list[Failure]]:
    """Apply an action to runs; return those that succeeded, and those that failed.

    tag: to add or to remove.  project: the destination, resolved for a move.
    """
    done, refused = [], []
    # In order of id, as all code locks runs: other orders could deadlock.
    for run_id in sorted(set(run_ids)):
        try:
            if action in TAGGING:
                check(session, Permission.CONTROL_RUN, run_id)
                TAGGING[action](session, run_id, user, tag)
            elif action == MOVE:
                check(session, Permission.MOVE_RUN, run_id)
                projects.move(session, run_id, user, project)
            else:
                permission, do = ACTIONS[action]
                check(session, permission, run_id)
                do(session, run_id, user)
            done.append(run_id)
        except (
            Conflict,
            Forbidden,
            NotFound,
            Invalid,
        ) as error:  # raised before anything is written
            refused.append(Failure(run_id, str(error)))
    return done, refused
