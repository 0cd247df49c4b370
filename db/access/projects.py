"""Projects and the roles of their members."""

from collections.abc import Sequence

from sqlalchemy import delete, inspect, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.access import permissions
from db.access.permissions import ROLES
from db.errors import Conflict, Invalid, NotFound
from db.names import check_name, key_of
from db.queue import quotas
from db.runs import notes, runs
from db.sweeps import sweeps
from db.sweeps.sweeps import CANCELLED
from db.tables import (
    ACTIVE,
    WATCH,
    AlertRule,
    ApiToken,
    ArtifactCollection,
    ArtifactLink,
    ArtifactVersion,
    CheckReport,
    Membership,
    Note,
    Preset,
    Project,
    Report,
    RetentionRule,
    Run,
    Status,
    Sweep,
    Trial,
    Upload,
    User,
)

#: Name of the Default project: of runs without another one.
DEFAULT = ""
NAME_CHARACTERS = 200
#: Tables with a column of the project's name, except runs.
OF_PROJECT = (
    *(Membership, Sweep, ApiToken, AlertRule, Preset, Report, RetentionRule, Upload),
    *(ArtifactCollection, CheckReport),
)


def get(session: Session, name: str) -> Project:
    """Return a project. Raises NotFound."""
    project = session.get(Project, name)
    if project is None:
        raise NotFound(f"There is no project {name[:100]!r}.")
    return project


def lock_shared(session: Session, name: str) -> None:
    """Check that a project exists, and lock it against renames and deletion until the commit.

    Raises Invalid.
    """
    if not _lock_if_exists(session, name) and name != DEFAULT:
        text = f"{name[:100]!r} was renamed or deleted in the meantime; use an existing project"
        raise Invalid({"project": text})


def _lock_if_exists(session: Session, name: str | None) -> bool:
    """Lock a project, if it exists, against renames and deletion."""
    query = select(Project.name).where(Project.name == name)
    return session.scalar(query.with_for_update(read=True, key_share=True)) is not None


def lock_within(session: Session, kind: type[Run | Sweep], row_id: int) -> None:
    """Lock a run or a sweep after its project, in the same order as renames of the project."""
    while True:
        name = session.scalar(select(kind.project).where(kind.id == row_id))
        with session.begin_nested() as tried:
            _lock_if_exists(session, name)
            locked = select(kind.project).where(kind.id == row_id).with_for_update()
            if session.scalar(locked) == name:
                return
            tried.rollback()  # moved to another project, which must be locked first


def list_projects(session: Session, names: Sequence[str] | None = None) -> list[Project]:
    """Return projects by name. names: only these."""
    query = select(Project).order_by(Project.name)
    return list(session.scalars(query if names is None else query.where(Project.name.in_(names))))


def make(session: Session, name: str) -> Project:
    """Create a project. Raises Invalid if the name is taken or not allowed."""
    project = Project(name=_new_name(session, name))
    session.add(project)
    session.flush()
    return project


def rename(session: Session, name: str, new_name: str) -> Project:
    """Rename a project in all tables. Raises Invalid, NotFound."""
    project = _get_own(session, name)
    _lock_exclusively(session, name)
    session.refresh(project)  # its previous holder may have set a limit
    new_name = _new_name(session, new_name, but=name)
    columns = inspect(Project).column_attrs.keys()
    values = {column: getattr(project, column) for column in columns if column != "name"}
    renamed = Project(name=new_name, **values)
    session.add(renamed)
    session.flush()  # before the rows that refer to it
    for table in OF_PROJECT:
        session.execute(update(table).where(table.project == name).values(project=new_name))
    note = update(Note).where(Note.subject == notes.of_project(name))
    session.execute(note.values(subject=notes.of_project(new_name)))
    # In order of ids, like all locks of runs.
    its_runs = select(Run.id).where(Run.project == name).order_by(Run.id)
    its_runs = its_runs.with_for_update(key_share=True)
    moved = update(Run).where(Run.id.in_(its_runs))
    session.execute(moved.values(project=new_name, revision=Run.revision + 1))
    session.execute(delete(Project).where(Project.name == name))
    return renamed


def delete_empty(session: Session, name: str) -> None:
    """Delete a project without runs and reports. Raises Conflict, Invalid, NotFound.

    Those in the trash count. Its roles, tokens, rules, presets, checks, note and empty sweeps are
    deleted.
    """
    _get_own(session, name)
    _lock_exclusively(session, name)
    going_on = (Sweep.status != CANCELLED, Sweep.submitted < Sweep.runs_total)
    with permissions.lift_limit(session):
        if session.scalar(select(Run.id).where(Run.project == name).limit(1)) is not None:
            text = "runs, those in the trash included: only an empty one is deleted"
            raise Conflict(f"The project {name!r} has {text}.")
        versions = select(ArtifactVersion.id).join(ArtifactCollection)
        versions = versions.where(ArtifactCollection.project == name)
        if session.scalar(versions.where(ArtifactVersion.deleted_at.is_(None)).limit(1)):
            raise Conflict(f"The project {name!r} has artifacts: delete their versions first.")
        if session.scalar(select(Report.id).where(Report.project == name).limit(1)) is not None:
            text = "reports, those in the trash included: delete them permanently first"
            raise Conflict(f"The project {name!r} has {text}.")
        query = select(Sweep.id).where(Sweep.project == name, *going_on).order_by(Sweep.id)
        if (sweep_id := session.scalar(query.limit(1))) is not None:
            text = f"The project {name!r} has sweep {sweep_id}, which has more runs to submit"
            raise Conflict(f"{text}: cancel or move it first.")
    its_sweeps = select(Sweep.id).where(Sweep.project == name)
    session.execute(delete(Trial).where(Trial.sweep_id.in_(its_sweeps)))
    session.execute(delete(Sweep).where(Sweep.project == name))
    session.execute(update(AlertRule).where(AlertRule.project == name).values(is_on=False))
    collections = select(ArtifactCollection.id).where(ArtifactCollection.project == name)
    of_collections = ArtifactVersion.collection_id.in_(collections)
    its_versions = select(ArtifactVersion.id).where(of_collections)
    session.execute(delete(ArtifactLink).where(ArtifactLink.version_id.in_(its_versions)))
    session.execute(delete(ArtifactVersion).where(of_collections))
    for its in (
        ArtifactCollection,
        CheckReport,
        Membership,
        ApiToken,
        Preset,
        RetentionRule,
        Upload,
    ):
        session.execute(delete(its).where(its.project == name))
    session.execute(delete(Note).where(Note.subject == notes.of_project(name)))
    session.execute(delete(Project).where(Project.name == name))


def move(session: Session, run_id: int, user: User, project: str) -> Run:
    """Move a run to another project, whose quotas then apply.

    Raises Conflict, NotFound, OverQuota.
    """
    get(session, project)
    lock_shared(session, project)
    run = runs.get(session, run_id, lock=True)
    if run.project == project:
        return run
    if run.status in ACTIVE and run.source != WATCH:
        raise Conflict(f"Run {run_id} uses devices of its project: move it after it has ended.")
    trial_of = session.scalar(select(Trial.sweep_id).where(Trial.run_id == run_id))
    if trial_of is not None:
        text = f"Run {run_id} is a trial of sweep {trial_of}"
        raise Conflict(f"{text}: move the sweep.")
    if run.status == Status.QUEUED:
        quotas.check_submission(session, session.get_one(User, run.owner_id), project)
    if run.stored_bytes:
        quotas.check_storage(session, project, run.stored_bytes)
    _move(session, run, user, project)
    return run


def move_sweep(session: Session, sweep_id: int, user: User, project: str) -> Sweep:
    """Move a sweep and all of its runs, also in the trash, to another project.

    Its quotas then apply. Raises Conflict, NotFound, OverQuota.
    """
    get(session, project)
    lock_shared(session, project)
    sweep = sweeps.get(session, sweep_id, lock=True)
    if sweep.project == project:
        return sweep
    query = select(Run).join(Trial, Trial.run_id == Run.id).where(Trial.sweep_id == sweep_id)
    query = query.where(Run.erased_at.is_(None)).order_by(Run.id).with_for_update(of=Run)
    trials = session.scalars(query.execution_options(populate_existing=True)).all()
    training = [run.id for run in trials if run.status in ACTIVE]
    if training:
        named = f"run {training[0]}" if len(training) == 1 else f"{len(training)} runs"
        text = f"Sweep {sweep_id} has {named} with devices of its project"
        raise Conflict(f"{text}: move it once they have ended, or pause them.")
    if stored_bytes := sum(run.stored_bytes for run in trials):
        quotas.check_storage(session, project, stored_bytes)
    for run in trials:
        if run.status == Status.QUEUED:
            quotas.check_submission(session, session.get_one(User, run.owner_id), project)
        _move(session, run, user, project)
    sweep.project = project
    sweep.revision += 1
    session.flush()
    return sweep


def _move(session: Session, run: Run, user: User, project: str) -> None:
    before, run.project = run.project, project
    called = f"from {quotas.label_of(before)} to {quotas.label_of(project)}"
    runs.remark(session, run, f"moved by {user.name}, {called}")


def _lock_exclusively(session: Session, name: str) -> None:
    """Lock a project exclusively, after waiting for its current holders."""
    query = select(Project.name).where(Project.name == name).with_for_update()
    if session.scalar(query) is None:
        raise NotFound(f"There is no project {name[:100]!r}.")


def _get_own(session: Session, name: str) -> Project:
    """Return a project other than the default one. Raises Invalid, NotFound."""
    if name == DEFAULT:
        raise Invalid(
            {"name": "'' is the default project, which always exists; allowed: any other"}
        )
    return get(session, name)


def _new_name(session: Session, name: str, but: str = DEFAULT) -> str:
    """Return a valid name that no other project has, or one that looks alike. Raises Invalid."""
    name = check_name(name, most=NAME_CHARACTERS)
    for other in session.scalars(select(Project.name)):
        is_other = other != but or other == name
        if is_other and key_of(other) == key_of(name):
            raise Invalid({"name": f"a project {other!r} already exists; use another name"})
    return name


def get_or_create(session: Session, name: str) -> Project:
    """Return a project, created if missing. Raises Invalid."""
    if (project := session.get(Project, name)) is not None:
        lock_shared(session, name)
        return project
    project = Project(name=check_name(name, most=NAME_CHARACTERS))
    try:
        with session.begin_nested():
            session.add(project)
    except IntegrityError:  # created concurrently
        return get(session, project.name)
    return project


def members(session: Session, name: str) -> list[tuple[User, str]]:
    """List the members of a project by name, with their roles."""
    query = select(User, Membership.role).join(Membership, Membership.user_id == User.id)
    query = query.where(Membership.project == name, User.removed_at.is_(None)).order_by(User.name)
    return [(user, role) for user, role in session.execute(query)]


def memberships(session: Session, user: User) -> dict[str, str]:
    """Return a user's roles by project, in order."""
    query = select(Membership.project, Membership.role).where(Membership.user_id == user.id)
    return {row[0]: row[1] for row in session.execute(query.order_by(Membership.project))}


def set_role(session: Session, user: User, project: str, role: str) -> None:
    """Set a user's role in a project. Raises Invalid, NotFound."""
    if role not in ROLES:
        raise Invalid({"role": f"{role[:100]!r} is not valid; allowed: {', '.join(ROLES)}"})
    get(session, project)
    session.merge(Membership(project=project, user_id=user.id, role=role))


def take_role(session: Session, user: User, project: str) -> None:
    """Revoke a user's role in a project."""
    mine = (Membership.project == project, Membership.user_id == user.id)
    session.execute(delete(Membership).where(*mine))
