"""Quotas of projects and users, their current usage, and the fair order of the queue.

A project's limits and share are columns of its row, a user's are settings; docs/how-to/teams.md
explains how to set them. A claim reads only devices in use, which are few however many runs exist.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from types import EllipsisType
from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Select,
    bindparam,
    case,
    exists,
    func,
    null,
    or_,
    select,
)
from sqlalchemy.orm import Session

from db.access import permissions
from db.errors import Invalid, OverQuota
from db.tables import (
    LARGEST_ID,
    ArtifactCollection,
    ArtifactEntry,
    ArtifactVersion,
    Blob,
    Project,
    Report,
    ReportImage,
    Run,
    RunNode,
    Status,
    User,
)
from halfstep.number_formats import size as size_text

GIB = 2.0**30  # bytes
#: Range of each limit.
BOUNDS = {
    "devices": (0, 1_000_000),
    "queued": (0, 1_000_000),
    "stored_gib": (0.0, 2.0**30),
    "share": (0.001, 1000.0),
}
WHOLE = ("devices", "queued")
NEEDED = Run.nodes * Run.devices_per_node

#: Built once, so that statements with this order can be cached.
_URGENT_FIRST, _IN_POSITION = Run.priority.desc(), (Run.position.asc(), Run.id.asc())
_QUEUED_PER_USER = "queued_per_user"


@dataclass(frozen=True)
class Usage:
    """Devices in use by project, owner and worker, with the projects' limits and shares."""

    by_project: Counter[str]
    by_owner: Counter[int]
    by_worker: Counter[int]  # empty unless requested
    limits: dict[str, int]  # of the projects that have one
    shares: dict[str, float]  # of every project

    @classmethod
    def read(
        cls, session: Session, *, of_workers: bool = False, in_any_case: bool = True
    ) -> "Usage":
        """Read the usage in one query of the projects with their nodes in training.

        in_any_case: False leaves out the devices in use if no limit or share needs them.
        """
        # The connection bypasses permissions; the session's user receives only counts.
        parameters = {"usage_in_any_case": in_any_case}
        rows = session.connection().execute(_usage(of_workers), parameters).all()
        usage = cls(Counter(), Counter(), Counter(), {}, {row.name: row.share for row in rows})
        for row in rows:
            if row.devices is not None:
                usage.limits[row.name] = row.devices
            if row.used is not None:
                usage.by_project[row.name] += int(row.used)
                usage.by_owner[row.owner_id] += int(row.used)
                if of_workers:
                    usage.by_worker[row.worker_id] += int(row.used)
        return usage

    def load(self, project: str) -> float:
        """Return a project's devices in use, divided by its share."""
        return self.by_project[project] / self.shares.get(project, 1.0)

    @property
    def loads(self) -> ColumnElement[float] | None:
        """The load of a run's project, in SQL; None where it makes no difference."""
        if len(self.shares) < 2 or not self.by_project:
            return None
        loads = {project: self.load(project) for project in self.by_project}
        return case(loads, value=Run.project, else_=0.0)

    @property
    def order(self) -> tuple[ColumnElement[Any], ...]:
        """Order of the queue: priority, then the project with the least load, then position."""
        fair = () if self.loads is None else (self.loads,)
        return (_URGENT_FIRST, *fair, *_IN_POSITION)

    def allows(self, devices_per_user: int) -> list[ColumnElement[bool]]:
        """Return the conditions that a queued run is within its project's and owner's limits."""
        conditions = []
        if self.limits:
            left = {name: most - self.by_project[name] for name, most in self.limits.items()}
            conditions.append(case(left, value=Run.project, else_=LARGEST_ID) >= NEEDED)
        if devices_per_user:
            conditions.append(devices_per_user >= NEEDED)
            left_of = {owner: devices_per_user - used for owner, used in self.by_owner.items()}
            if left_of:
                conditions.append(
                    case(left_of, value=Run.owner_id, else_=devices_per_user) >= NEEDED
                )
        return conditions

    def obstacle(self, run: Any, devices_per_user: int) -> str:
        """Return which device limit blocks a queued run; empty if none does."""
        needed = run.nodes * run.devices_per_node
        used, most = self.by_project[run.project], self.limits.get(run.project)
        if most is not None and used + needed > most:
            return _too_many(label_of(run.project), used, most, needed)
        used = self.by_owner[run.owner_id]
        if devices_per_user and used + needed > devices_per_user:
            return _too_many("its owner", used, devices_per_user, needed)
        return ""

    def in_turn(self, rows: Iterable[Any]) -> list[Any]:
        """Order queued runs, given by priority and position, as they start if they all fit."""
        used, ordered = Counter(self.by_project), []
        for _priority, alike in groupby(rows, key=lambda row: row.priority):
            lines: dict[str, deque[Any]] = defaultdict(deque)
            for position, row in enumerate(alike):
                lines[row.project].append((position, row))

            def turn(project: str, line: deque[Any]) -> tuple[float, int, str]:
                return used[project] / self.shares.get(project, 1.0), line[0][0], project

            turns = [turn(project, line) for project, line in lines.items()]
            heapify(turns)
            while turns:
                project = turns[0][2]
                _position, row = lines[project].popleft()
                ordered.append(row)
                used[project] += row.nodes * row.devices_per_node
                if lines[project]:
                    heapreplace(turns, turn(project, lines[project]))
                else:
                    heappop(turns)
        return ordered


@cache  # slow to build, and every claim needs it
def _usage(of_workers: bool) -> Select[Any]:
    worker_id = RunNode.worker_id if of_workers else null()
    kind = (Run.project, Run.owner_id, worker_id.label("worker_id"))
    devices = func.sum(func.json_array_length(RunNode.devices)).label("used")
    nodes = select(*kind, devices).join(Run, Run.id == RunNode.run_id)
    nodes = nodes.where(RunNode.ended_at.is_(None), RunNode.worker_id.is_not(None))
    nodes = nodes.where(
        or_(
            bindparam("usage_in_any_case", type_=Boolean),
            select(func.count() > 1).select_from(Project).scalar_subquery(),
            exists().where(Project.devices.is_not(None)),
        )
    )
    in_use = nodes.group_by(*(kind if of_workers else kind[:2])).subquery()
    columns = (Project.name, Project.devices, Project.share)
    usage = select(*columns, in_use.c.owner_id, in_use.c.worker_id, in_use.c.used)
    return usage.outerjoin(in_use, in_use.c.project == Project.name)


def _too_many(subject: str, used: int, most: int, needed: int) -> str:
    if used >= most:
        return f"{subject} uses {_count(used, 'device')}, the limit"
    return f"{subject} uses {used} of at most {_count(most, 'device')}, and the run needs {needed}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def label_of(project: str) -> str:
    """Return the name of a project for use in a sentence."""
    return f"project {project}" if project else "Default project"


def take_turns(session: Session, *, per_user: bool) -> None:
    """Serialize claims under limits: two at once would both take the last allowed device."""
    queued = Run.status == Status.QUEUED
    if per_user:
        owners = select(User.id).where(User.id.in_(select(Run.owner_id).where(queued)))
        session.execute(owners.order_by(User.id).with_for_update(key_share=True))
    limited = select(Project.name).where(Project.devices.is_not(None)).order_by(Project.name)
    session.execute(limited.with_for_update(key_share=True))


def allow(session: Session, *, queued_per_user: int) -> None:
    """Set the limit of queued runs per user for a session; 0 means none."""
    session.info[_QUEUED_PER_USER] = queued_per_user


def check_submission(session: Session, owner: User, project: str) -> None:
    """Check that one more run may be queued; locked until the commit. Raises OverQuota."""
    _take_turn(session, owner, project)
    if errors := submission_obstacle(session, owner, project):
        raise OverQuota(errors)


def has_room(session: Session, owner: User, project: str) -> bool:
    """Return whether one more run may be queued; locked until the commit."""
    _take_turn(session, owner, project)
    return not submission_obstacle(session, owner, project)


def _take_turn(session: Session, owner: User, project: str) -> None:
    """Serialize submissions with the locks that claims take, in the same order."""
    if session.info.get(_QUEUED_PER_USER, 0):
        mine = select(User.id).where(User.id == owner.id)
        session.execute(mine.with_for_update(key_share=True))
    lock_limits(session, project)


def lock_limits(session: Session, project: str) -> None:
    """Serialize changes below a project's limits until the commit, if it has any."""
    is_limited = or_(Project.queued.is_not(None), Project.stored_gib.is_not(None))
    limited = select(Project.name).where(Project.name == project, is_limited)
    session.execute(limited.with_for_update(key_share=True))


def submission_obstacle(session: Session, owner: User, project: str) -> dict[str, str]:
    """Return by field why no further run may be queued; empty if one may."""
    most = session.info.get(_QUEUED_PER_USER, 0)
    if most and _count_queued(session, most, Run.owner_id == owner.id) >= most:
        text = f"{owner.name} has {_count(most, 'run')} in the queue, the limit per user"
        return {"owner": f"{text}; allowed: once one of them has started"}
    limits = session.get(Project, project)
    most = limits.queued if limits is not None else None
    if most is not None and _count_queued(session, most, Run.project == project) >= most:
        text = f"{label_of(project)} has {_count(most, 'run')} in the queue, its limit"
        return {"project": f"{text}; allowed: once one of them has started, or another project"}
    if text := over_storage(session, project):
        return {"project": f"{text}; delete files first, or another project"}
    return {}


def _count_queued(session: Session, most: int, condition: ColumnElement[bool]) -> int:
    """Count queued runs, up to a limit."""
    some = select(Run.id).where(Run.status == Status.QUEUED, condition).limit(most).subquery()
    with permissions.lift_limit(session):
        return int(session.scalar(select(func.count()).select_from(some)) or 0)


def check_storage(session: Session, project: str, more_bytes: int) -> None:
    """Check that a project may store this many more bytes. Raises OverQuota."""
    if text := over_storage(session, project, more_bytes):
        raise OverQuota({"project": f"with it {text}; delete files first"})


def over_storage(session: Session, name: str, more_bytes: int = 0) -> str:
    """Return an error if a project's files exceed its storage limit; empty otherwise.

    more_bytes: size of files about to be stored.
    """
    project = session.get(Project, name)
    if project is None or project.stored_gib is None:
        return ""
    stored = func.sum(Run.stored_bytes)
    with permissions.lift_limit(session):
        stored_bytes = int(session.scalar(select(stored).where(Run.project == name)) or 0)
    stored_bytes += more_bytes + artifact_bytes(session, [name]).get(name, 0)
    stored_bytes += image_bytes(session, [name]).get(name, 0)
    if stored_bytes <= project.stored_gib * GIB:
        return ""
    text = f"{label_of(name)} stores {size_text(stored_bytes)}"
    return f"{text}, more than its limit of {size_text(project.stored_gib * GIB)}"


def artifact_bytes(session: Session, names: Sequence[str]) -> dict[str, int]:
    """Return the size of the named artifacts of projects; each project counts content once."""
    columns = (ArtifactCollection.project, Blob.id, Blob.size_bytes)
    query = select(*columns).join(ArtifactEntry, ArtifactEntry.blob_id == Blob.id)
    query = query.join(ArtifactVersion, ArtifactVersion.id == ArtifactEntry.version_id)
    query = query.join(ArtifactCollection, ArtifactCollection.id == ArtifactVersion.collection_id)
    once = query.where(ArtifactCollection.project.in_(names)).distinct().subquery()
    total = select(once.c.project, func.sum(once.c.size_bytes)).group_by(once.c.project)
    with permissions.lift_limit(session):
        return {row[0]: int(row[1]) for row in session.execute(total)}


def image_bytes(session: Session, names: Sequence[str]) -> dict[str, int]:
    """Return the size of the images of projects' reports."""
    total = select(Report.project, func.sum(ReportImage.size_bytes))
    total = total.join(ReportImage, ReportImage.report_id == Report.id)
    total = total.where(Report.project.in_(names)).group_by(Report.project)
    with permissions.lift_limit(session):
        return {row[0]: int(row[1]) for row in session.execute(total)}


def read_usage(session: Session, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the usage of each project: devices, queued runs and stored bytes."""
    devices = Usage.read(session).by_project
    queued = select(Run.project, func.count()).where(Run.status == Status.QUEUED)
    stored = select(Run.project, func.sum(Run.stored_bytes))
    in_projects = Run.project.in_(names)
    with permissions.lift_limit(session):
        waiting, bytes_of = (
            {
                row[0]: int(row[1])
                for row in session.execute(query.where(in_projects).group_by(Run.project))
            }
            for query in (queued, stored)
        )
    of_artifacts, of_images = artifact_bytes(session, names), image_bytes(session, names)
    return {
        name: {
            "devices_used": devices[name],
            "queued_used": waiting.get(name, 0),
            "stored_bytes": sum(of.get(name, 0) for of in (bytes_of, of_artifacts, of_images)),
        }
        for name in names
    }


def set_limits(project: Project, given: Mapping[str, float | str | None]) -> None:
    """Set a project's limits and share by name. None or "": no limit. Raises Invalid."""
    read = {name: _number(name, value) for name, value in given.items()}
    errors = {
        name: _describe_bounds(name, given[name]) for name, value in read.items() if value is ...
    }
    if errors:
        raise Invalid(errors)
    for name, value in read.items():
        setattr(project, name, value)


def _number(name: str, value: float | str | None) -> float | EllipsisType | None:
    """Return the value of a limit; an ellipsis if it is not allowed."""
    if value is None or value == "":
        return None if name != "share" else ...
    try:
        number = float(value)
    except ValueError:
        return ...
    low, high = BOUNDS[name]
    if not low <= number <= high or (name in WHOLE and number != int(number)):
        return ...
    return int(number) if name in WHOLE else number


def _describe_bounds(name: str, value: float | str | None) -> str:
    low, high = BOUNDS[name]
    kind = "a whole number" if name in WHOLE else "a number"
    none = "" if name == "share" else ", or nothing for no limit"
    return f"{str(value)[:50]!r} is not valid; allowed: {kind} from {low:g} to {high:,.0f}{none}"
