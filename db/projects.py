"""Projects, and who has which role in them."""

from collections.abc import Sequence

from sqlalchemy import delete, inspect, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db import notes, quotas, rights, runs
from db.errors import Conflict, Invalid, NotFound
from db.names import checked_name, key_of
from db.rights import ROLES
from db.tables import (
    ACTIVE,
    WATCH,
    AlertRule,
    ApiToken,
    Membership,
    Note,
    Preset,
    Project,
    RetentionRule,
    Run,
    Status,
    Sweep,
    Trial,
    User,
)

#: The project of all runs of which nobody says another.
DEFAULT = ""
NAME_CHARACTERS = 200


def get(session: Session, name: str) -> Project:
    """Return a project. Raises NotFound."""
    project = session.get(Project, name)
    if project is None:
        raise NotFound(f"There is no project {name[:100]!r}.")
    return project


def listed(session: Session, names: Sequence[str] | None = None) -> list[Project]:
    """List projects by name. names: these alone."""
    query = select(Project).order_by(Project.name)
    return list(session.scalars(query if names is None else query.where(Project.name.in_(names))))


def make(session: Session, name: str) -> Project:
    """Make a project. Raises Invalid if there is one of that name, or it cannot be one."""
    project = Project(name=_new_name(session, name))
    session.add(project)
    session.flush()
    return project


def rename(session: Session, name: str, new_name: str) -> Project:
    """Call a project otherwise, with all that is of it. Raises Invalid, NotFound."""
    project = _own(session, name)
    new_name = _new_name(session, new_name, but=name)
    columns = inspect(Project).column_attrs.keys()
    kept = {each: getattr(project, each) for each in columns if each != "name"}
    renamed = Project(name=new_name, **kept)
    session.add(renamed)
    session.flush()  # before what points there
    for table in (Membership, Sweep, ApiToken, AlertRule, Preset, RetentionRule):
        session.execute(update(table).where(table.project == name).values(project=new_name))
    note = update(Note).where(Note.subject == notes.of_project(name))
    session.execute(note.values(subject=notes.of_project(new_name)))
    moved = update(Run).where(Run.project == name)
    session.execute(moved.values(project=new_name, revision=Run.revision + 1))
    session.execute(delete(Project).where(Project.name == name))
    return renamed


def delete_empty(session: Session, name: str) -> None:
    """Delete a project of which there is no run, in the bin neither, and no sweep, with its roles,
    tokens, rules, presets and note. Raises Conflict, Invalid, NotFound.
    """
    _own(session, name)
    with rights.unlimited(session):
        for table, what in ((Run, "runs, those in the bin included"), (Sweep, "sweeps")):
            if session.scalar(select(table.id).where(table.project == name).limit(1)) is not None:
                raise Conflict(f"The project {name!r} has {what}: only an empty one is deleted.")
    session.execute(update(AlertRule).where(AlertRule.project == name).values(is_on=False))
    for its in (Membership, ApiToken, Preset, RetentionRule):
        session.execute(delete(its).where(its.project == name))
    session.execute(delete(Note).where(Note.subject == notes.of_project(name)))
    session.execute(delete(Project).where(Project.name == name))


def move(session: Session, run_id: int, user: User, project: str) -> Run:
    """Let a run belong to another project, whose limits hold for it. Raises Conflict, NotFound,
    OverQuota.
    """
    get(session, project)
    run = runs.get(session, run_id, lock=True)
    if run.project == project:
        return run
    if run.status in ACTIVE and run.source != WATCH:
        raise Conflict(f"Run {run_id} has devices of its project: move it once it has ended.")
    trial_of = session.scalar(select(Trial.sweep_id).where(Trial.run_id == run_id))
    if trial_of is not None:
        raise Conflict(f"Run {run_id} is a trial of sweep {trial_of}, and stays with the others.")
    if run.status == Status.QUEUED:
        quotas.check_submission(session, session.get_one(User, run.owner_id), project)
    if run.stored_bytes:
        quotas.check_storage(session, project, run.stored_bytes)
    before, run.project = run.project, project
    called = f"from {quotas.called(before)} to {quotas.called(project)}"
    runs.remark(session, run, f"moved by {user.name}, {called}")
    return run


def _own(session: Session, name: str) -> Project:
    """Return a project that somebody has made. Raises Invalid, NotFound."""
    if name == DEFAULT:
        raise Invalid({"name": "'' is the project that there always is; allowed: any other"})
    return get(session, name)


def _new_name(session: Session, name: str, but: str = DEFAULT) -> str:
    """Return a name that no other project has, nor one that looks so. Raises Invalid."""
    name = checked_name(name, most=NAME_CHARACTERS)
    for other in session.scalars(select(Project.name)):
        is_other = other != but or other == name
        if is_other and key_of(other) == key_of(name):
            raise Invalid({"name": f"there is a project {other!r}; allowed: another name"})
    return name


def found_or_made(session: Session, name: str) -> Project:
    """Return a project, made now if there is none. Raises Invalid."""
    if (project := session.get(Project, name)) is not None:
        return project
    project = Project(name=checked_name(name, most=NAME_CHARACTERS))
    try:
        with session.begin_nested():
            session.add(project)
    except IntegrityError:  # somebody else has made it meanwhile
        return get(session, project.name)
    return project


def members(session: Session, name: str) -> list[tuple[User, str]]:
    """List who has a role in a project, by name, with the role."""
    query = select(User, Membership.role).join(Membership, Membership.user_id == User.id)
    query = query.where(Membership.project == name, User.removed_at.is_(None)).order_by(User.name)
    return [(user, role) for user, role in session.execute(query)]


def memberships(session: Session, user: User) -> dict[str, str]:
    """Return somebody's role by project, in order of these."""
    query = select(Membership.project, Membership.role).where(Membership.user_id == user.id)
    return {row[0]: row[1] for row in session.execute(query.order_by(Membership.project))}


def set_role(session: Session, user: User, project: str, role: str) -> None:
    """Give somebody a role in a project, in place of the one before. Raises Invalid, NotFound."""
    if role not in ROLES:
        raise Invalid({"role": f"{role[:100]!r} is not allowed; allowed: {', '.join(ROLES)}"})
    get(session, project)
    session.merge(Membership(project=project, user_id=user.id, role=role))


def take_role(session: Session, user: User, project: str) -> None:
    """Let somebody have no role in a project any more."""
    mine = (Membership.project == project, Membership.user_id == user.id)
    session.execute(delete(Membership).where(*mine))
