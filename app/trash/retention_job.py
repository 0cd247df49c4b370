"""Periodic task that applies retention rules, with one transaction per run."""

import logging
from threading import Event

from sqlalchemy.orm import Session

from app.auth.permissions import Forbidden
from app.auth.project_parameters import resolve
from app.files.downloads import RETRY_SECONDS
from db.access.permissions import Grants, Permission
from db.database import Database, is_outage
from db.errors import Invalid
from db.files import pruning, retention
from db.files.object_store import open_store
from db.runs import runs
from db.settings import Settings

logger = logging.getLogger(__name__)

#: Scopes of a rule: all projects without their own rule, or in:NAME.
ALL, OF_PROJECT = "all", "in:"


def scope_of(project: str | None) -> str:
    """Return the scope of a rule."""
    return ALL if project is None else f"{OF_PROJECT}{project}"


def project_of(session: Session, grants: Grants, scope: str) -> str | None:
    """Return the project of a scope, None for the instance, if the user may set its rule.

    Raises NotFound, Forbidden, Invalid.
    """
    if scope == ALL:
        if grants.projects is not None or Permission.MANAGE_MEMBERS not in grants.most:
            raise Forbidden("Only an admin may do this.")
        return None
    if not scope.startswith(OF_PROJECT):
        text = f"{scope[:100]!r} is not valid; allowed: all, or in:PROJECT"
        raise Invalid({"scope": text})
    project = scope.removeprefix(OF_PROJECT)
    return resolve(session, Permission.MANAGE_MEMBERS, project, "set retention rules of")


def prune_due(settings: Settings, database: Database, stopping: Event) -> None:
    """Apply all rules once; safe to run on two servers at the same time.

    An error of one run does not affect the others.
    """
    with database.reading() as session:
        due = retention.due(session)
    store = open_store(settings, retry_seconds=RETRY_SECONDS) if due else None
    for run_id, rules in due:
        if stopping.is_set() or store is None:
            return
        try:
            with database.reading() as session:  # most have nothing to delete
                is_due = bool(pruning.of_run(session, runs.get(session, run_id), rules))
            if is_due:
                pruning.prune(database, store, run_id, rules)
        except Exception as error:
            if is_outage(error):
                raise
            logger.warning("run %d cannot be pruned: %s", run_id, error)
