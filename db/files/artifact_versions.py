"""Named artifacts: saving, finding, aliasing and deleting their versions.

A version lists files by SHA-256; their content is stored once as blobs. A sender must upload a
file unless the project already has it: knowing a hash gives no access to another project's file.
"""

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from obstore.store import ObjectStore
from sqlalchemy import ColumnElement, Select, delete, exists, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db import clock
from db.access import permissions, projects
from db.access.permissions import Permission
from db.database import Database
from db.errors import Conflict, Invalid, NotFound
from db.files.object_store import delete_files
from db.files.storage import BLOBS
from db.paging import Page, page
from db.tables import (
    ENDED,
    LARGEST_COUNT,
    MADE,
    NOT_DELETED,
    USED,
    ArtifactAlias,
    ArtifactCollection,
    ArtifactEntry,
    ArtifactLink,
    ArtifactVersion,
    Blob,
    Run,
    User,
)
from halfstep.artifacts.manifest import Entry, check_entries, digest_of
from halfstep.artifacts.names import LATEST, ArtifactError, Version
from halfstep.telemetry import events

#: Entries per statement, below the limit of bound parameters of both databases.
BATCH = 500
#: Blobs without a version that one collection deletes.
MOST_COLLECTED = 1000
IS_READY = ArtifactVersion.completed_at.is_not(None) & ArtifactVersion.deleted_at.is_(None)


def save(
    session: Session,
    user: User,
    project: str,
    name: str,
    *,
    type: str,  # noqa: A002 - as the API calls it
    entries: Collection[Entry],
    is_file: bool = False,
    aliases: Iterable[str] = (),
) -> ArtifactVersion:
    """Return the version with this content, which is new unless the artifact has it already.

    It is complete once all files are stored; then it gets the aliases, and `latest`. Raises
    Invalid.
    """
    try:
        check_entries(entries)
    except ArtifactError as error:
        raise Invalid({"files": str(error)}) from error
    size_bytes = sum(entry.size_bytes for entry in entries)
    if size_bytes > LARGEST_COUNT:
        text = f"they have {size_bytes:,} bytes; allowed: at most {LARGEST_COUNT:,}"
        raise Invalid({"files": text})
    collection = _lock_collection(session, project, name, type)
    digest = digest_of(entries)
    query = select(ArtifactVersion).where(
        ArtifactVersion.collection_id == collection.id,
        ArtifactVersion.digest == digest,
        ArtifactVersion.deleted_at.is_(None),
    )
    version = session.scalar(query)
    if version is None:
        version = _add(session, user, collection, digest, entries)
        version.is_file = is_file and len(entries) == 1
    version.new_aliases = list(dict.fromkeys([*version.new_aliases, *aliases, LATEST]))
    if version.completed_at is not None:
        _set_new_aliases(session, version, is_resaved=True)
    else:
        _complete(session, [version.id])
    return version


def save_of_run(session: Session, run: Run, event: events.SavedArtifact) -> ArtifactVersion:
    """Record a version that a run has saved. Raises Invalid."""
    user = session.get_one(User, run.owner_id)
    entries = [Entry(file.name, file.size_bytes, file.sha256) for file in event.files]
    version = save(
        session,
        user,
        run.project,
        event.name,
        type=event.type,
        entries=entries,
        is_file=event.is_file,
        aliases=event.aliases,
    )
    _link(session, run, version, MADE)
    return version


def use_by_run(session: Session, run: Run, event: events.UsedArtifact) -> None:
    """Record that a run uses a version. Raises NotFound, also if its owner may not see it."""
    owner = session.get_one(User, run.owner_id)
    may_see = permissions.grants(session, owner).may(Permission.VIEW_RUN, event.project)
    query = select(ArtifactVersion).join(ArtifactCollection)
    query = query.where(
        ArtifactCollection.project == event.project,
        ArtifactCollection.name == event.name,
        ArtifactVersion.digest == event.digest,
    )
    version = session.scalar(query.order_by(ArtifactVersion.id.desc()).limit(1))
    if version is None or not may_see:
        raise NotFound(f"There is no artifact {event.name}@{event.digest[:12]}.")
    _link(session, run, version, USED)


def _link(session: Session, run: Run, version: ArtifactVersion, role: str) -> None:
    row = ArtifactLink(run_id=run.id, version_id=version.id, role=role)
    if session.get(ArtifactLink, (run.id, version.id, role)) is None:
        session.add(row)
        run.revision += 1
        run.files_revision = run.revision
        session.flush()


def _lock_collection(session: Session, project: str, name: str, type_: str) -> ArtifactCollection:
    """Return the artifact of a name, created if missing, locked until the commit."""
    projects.lock_shared(session, project)
    query = select(ArtifactCollection).where(
        ArtifactCollection.project == project, ArtifactCollection.name == name
    )
    query = query.with_for_update().execution_options(populate_existing=True)
    collection = session.scalar(query)
    if collection is None:
        try:
            with session.begin_nested():
                session.add(ArtifactCollection(project=project, name=name, type=type_))
        except IntegrityError:  # created concurrently
            pass
        collection = session.scalars(query).one()
    if collection.type != type_:
        text = f"the artifact {name!r} has the type {collection.type!r}, not {type_!r}"
        raise Invalid({"type": f"{text}; allowed: the same type, or another name"})
    return collection


def _add(
    session: Session,
    user: User,
    collection: ArtifactCollection,
    digest: str,
    entries: Collection[Entry],
) -> ArtifactVersion:
    version = ArtifactVersion(
        collection_id=collection.id,
        number=collection.next_number,
        digest=digest,
        size_bytes=sum(entry.size_bytes for entry in entries),
        files=len(entries),
        is_file=False,
        new_aliases=[],
        user_id=user.id,
    )
    collection.next_number += 1
    session.add(version)
    session.flush()
    digests = {entry.sha256 for entry in entries}
    known = find_known_blobs(session, collection.project, digests, lock=True)
    session.add_all(
        ArtifactEntry(
            version_id=version.id,
            path=entry.path,
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
            blob_id=known.get((entry.sha256, entry.size_bytes)),
        )
        for entry in entries
    )
    session.flush()
    return version


def find_known_blobs(
    session: Session, project: str, digests: Collection[str], *, lock: bool = False
) -> dict[tuple[str, int], int]:
    """Return the ids of blobs that versions of a project have, by SHA-256 and size.

    lock: against deletion.
    """
    known: dict[tuple[str, int], int] = {}
    ordered = sorted(digests)
    of_project = (
        select(ArtifactEntry.blob_id)
        .join(ArtifactVersion, ArtifactVersion.id == ArtifactEntry.version_id)
        .join(ArtifactCollection, ArtifactCollection.id == ArtifactVersion.collection_id)
        .where(ArtifactCollection.project == project, ArtifactEntry.blob_id == Blob.id)
    )
    for first in range(0, len(ordered), BATCH):
        query = select(Blob).where(Blob.sha256.in_(ordered[first:][:BATCH]), of_project.exists())
        if lock:
            query = query.with_for_update(read=True, key_share=True)
        for blob in session.scalars(query):
            known[blob.sha256, blob.size_bytes] = blob.id
    return known


# ---- Files ------------------------------------------------------------------------------------


def _is_of(run_id: int | None, version_id: int | None) -> ColumnElement[bool]:
    """Return the condition of the files of the versions that a run made, or of one version."""
    if version_id is not None:
        return ArtifactEntry.version_id == version_id
    made = select(ArtifactLink.version_id)
    made = made.where(ArtifactLink.run_id == run_id, ArtifactLink.role == MADE)
    return ArtifactEntry.version_id.in_(made)


def new_key(sha256: str) -> str:
    """Return a new key for content: not used before, so that no late deletion removes it."""
    return f"{BLOBS}/{sha256}-{uuid.uuid4().hex[:8]}"


def is_stored(
    session: Session,
    sha256: str,
    size_bytes: int,
    *,
    run_id: int | None = None,
    version_id: int | None = None,
) -> bool:
    """Return whether a file of a run's versions, or of one, is stored. Raises NotFound."""
    same = (ArtifactEntry.sha256 == sha256, ArtifactEntry.size_bytes == size_bytes)
    query = select(ArtifactEntry.blob_id).where(_is_of(run_id, version_id), *same)
    blob_ids = session.scalars(query).all()
    if not blob_ids:
        raise NotFound(
            f"No artifact names a file of {size_bytes} bytes with the SHA-256 {sha256}: save the "
            "artifact first."
        )
    return None not in blob_ids


def store_blob(
    session: Session,
    sha256: str,
    size_bytes: int,
    key: str,
    *,
    run_id: int | None = None,
    version_id: int | None = None,
) -> str:
    """Record that content is stored under a key; return the key that it has from now on.

    It is another one if the same content was stored before: the file under `key` is then unused.
    """
    lacking = (
        _is_of(run_id, version_id),
        ArtifactEntry.blob_id.is_(None),
        ArtifactEntry.sha256 == sha256,
        ArtifactEntry.size_bytes == size_bytes,
    )
    _lock_collections_of(session, select(ArtifactEntry.version_id).where(*lacking))
    blob = _blob(session, sha256, size_bytes, key)
    version_ids = session.scalars(select(ArtifactEntry.version_id).where(*lacking)).all()
    filled = update(ArtifactEntry).where(*lacking).values(blob_id=blob.id)
    session.execute(filled, execution_options={"synchronize_session": False})
    _complete(session, version_ids)
    return blob.key


def _lock_collections_of(session: Session, version_ids: Select[int]) -> None:
    """Lock the artifacts of versions until the commit, in order of ids to avoid deadlocks.

    Each of two transactions that store the last two files would otherwise see one missing.
    """
    ids = select(ArtifactVersion.collection_id).where(ArtifactVersion.id.in_(version_ids))
    query = select(ArtifactCollection.id).where(ArtifactCollection.id.in_(ids))
    session.execute(query.order_by(ArtifactCollection.id).with_for_update())


def _blob(session: Session, sha256: str, size_bytes: int, key: str) -> Blob:
    query = select(Blob).where(Blob.sha256 == sha256, Blob.size_bytes == size_bytes)
    query = query.with_for_update(read=True, key_share=True)
    while (blob := session.scalar(query)) is None:
        try:
            with session.begin_nested():
                session.add(Blob(sha256=sha256, size_bytes=size_bytes, key=key))
        except IntegrityError:  # stored concurrently
            continue
    return blob


def _complete(session: Session, version_ids: Collection[int]) -> None:
    """Mark those versions as complete whose files are all stored. Their artifacts are locked."""
    is_lacking = exists().where(
        ArtifactEntry.version_id == ArtifactVersion.id, ArtifactEntry.blob_id.is_(None)
    )
    query = select(ArtifactVersion).where(
        ArtifactVersion.id.in_(version_ids),
        ArtifactVersion.completed_at.is_(None),
        ArtifactVersion.deleted_at.is_(None),
        ~is_lacking,
    )
    query = query.order_by(ArtifactVersion.id).execution_options(populate_existing=True)
    for version in session.scalars(query).all():
        version.completed_at = clock.current(session)
        session.flush()
        _set_new_aliases(session, version)


# ---- Versions ---------------------------------------------------------------------------------


def collection_of(session: Session, collection_id: int) -> ArtifactCollection:
    """Return an artifact. Raises NotFound."""
    query = select(ArtifactCollection).where(ArtifactCollection.id == collection_id)
    collection = session.scalar(query)
    if collection is None:
        raise NotFound(f"There is no artifact {collection_id}.")
    return collection


def get(session: Session, version_id: int) -> tuple[ArtifactVersion, ArtifactCollection]:
    """Return a version and its artifact. Raises NotFound."""
    query = select(ArtifactVersion, ArtifactCollection).join(ArtifactCollection)
    row = session.execute(query.where(ArtifactVersion.id == version_id)).one_or_none()
    if row is None:
        raise NotFound(f"There is no version {version_id} of an artifact.")
    return row[0], row[1]


def find(
    session: Session,
    project: str,
    name: str,
    version: Version,
) -> tuple[ArtifactVersion, ArtifactCollection]:
    """Return a version by number, alias or the beginning of its digest. Raises NotFound."""
    query = select(ArtifactVersion, ArtifactCollection)
    query = query.join(
        ArtifactCollection, ArtifactCollection.id == ArtifactVersion.collection_id
    ).where(ArtifactCollection.project == project, ArtifactCollection.name == name)
    if version.number is not None:
        query = query.where(ArtifactVersion.number == version.number)
    elif version.digest is not None:
        query = query.where(ArtifactVersion.digest.startswith(version.digest))
    else:
        query = query.join(ArtifactAlias, ArtifactAlias.version_id == ArtifactVersion.id)
        query = query.where(ArtifactAlias.alias == version.alias)
    query = query.order_by(ArtifactVersion.deleted_at.is_not(None), ArtifactVersion.id.desc())
    row = session.execute(query.limit(1)).one_or_none()
    where = f"the project {project!r}" if project else "Default project"
    if row is None:
        raise NotFound(f"There is no artifact {name}:{version} in {where}.")
    found: ArtifactVersion = row[0]
    if found.deleted_at is not None:
        raise NotFound(f"The artifact {name}:v{found.number} in {where} is deleted.")
    return found, row[1]


def entries(session: Session, version_id: int) -> list[ArtifactEntry]:
    """List the files of a version in order of path."""
    query = select(ArtifactEntry).where(ArtifactEntry.version_id == version_id)
    return list(session.scalars(query.order_by(ArtifactEntry.path)))


def blob_of(session: Session, version_id: int, path: str) -> Blob:
    """Return the stored content of a version's file. Raises NotFound."""
    query = select(Blob).join(ArtifactEntry, ArtifactEntry.blob_id == Blob.id)
    query = query.where(ArtifactEntry.version_id == version_id, ArtifactEntry.path == path)
    blob = session.scalar(query)
    if blob is None:
        raise NotFound(f"There is no stored file {path[:200]!r} in this version.")
    return blob


@dataclass(frozen=True)
class FileChange:
    """A file that differs between two versions. A size is None where it does not exist."""

    path: str
    size_before: int | None
    size_after: int | None

    @property
    def kind(self) -> str:
        """added, removed or changed."""
        if self.size_before is None:
            return "added"
        return "removed" if self.size_after is None else "changed"


def diff(session: Session, before_id: int, after_id: int) -> list[FileChange]:
    """Return the files that differ between two versions, in order of path."""
    before, after = (
        {entry.path: entry for entry in entries(session, version_id)}
        for version_id in (before_id, after_id)
    )
    changes = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old is None or new is None or old.sha256 != new.sha256:
            sizes = (row.size_bytes if row else None for row in (old, new))
            changes.append(FileChange(path, *sizes))
    return changes


def list_artifacts(session: Session, project: str | None, *, after: str = "", limit: int) -> Page:
    """Return a page of artifacts that have a version, newest first. project: only of this one."""
    query = select(ArtifactCollection).where(
        exists().where(
            ArtifactVersion.collection_id == ArtifactCollection.id,
            ArtifactVersion.deleted_at.is_(None),
        )
    )
    if project is not None:
        query = query.where(ArtifactCollection.project == project)
    key = (ArtifactCollection.id,)
    return page(session, query, key, after=after, limit=limit, newest_first=True)


def counts(session: Session, collection_ids: Collection[int]) -> dict[int, int]:
    """Return how many versions artifacts have, by the artifact's id."""
    query = select(ArtifactVersion.collection_id, func.count()).where(
        ArtifactVersion.collection_id.in_(collection_ids), ArtifactVersion.deleted_at.is_(None)
    )
    rows = session.execute(query.group_by(ArtifactVersion.collection_id))
    return {row[0]: row[1] for row in rows}


def newest(session: Session, collection_ids: Collection[int]) -> dict[int, ArtifactVersion]:
    """Return the newest version of artifacts by the artifact's id."""
    last = select(func.max(ArtifactVersion.id)).where(
        ArtifactVersion.collection_id.in_(collection_ids), ArtifactVersion.deleted_at.is_(None)
    )
    ids = last.group_by(ArtifactVersion.collection_id)
    rows = session.scalars(select(ArtifactVersion).where(ArtifactVersion.id.in_(ids)))
    return {row.collection_id: row for row in rows}


def versions(session: Session, collection_id: int) -> list[ArtifactVersion]:
    """List the versions of an artifact, newest first."""
    query = select(ArtifactVersion).where(
        ArtifactVersion.collection_id == collection_id, ArtifactVersion.deleted_at.is_(None)
    )
    return list(session.scalars(query.order_by(ArtifactVersion.number.desc())))


def aliases(session: Session, collection_ids: Collection[int]) -> dict[int, list[str]]:
    """Return the aliases of versions by version id, `latest` first."""
    query = select(ArtifactAlias).where(ArtifactAlias.collection_id.in_(collection_ids))
    result: dict[int, list[str]] = {}
    for row in session.scalars(query.order_by(ArtifactAlias.alias != LATEST, ArtifactAlias.alias)):
        result.setdefault(row.version_id, []).append(row.alias)
    return result


def list_links(
    session: Session, version_ids: Collection[int]
) -> dict[int, dict[str, list[tuple[int, str]]]]:
    """Return the runs (id, name) that made or used versions: by version id and role."""
    query = select(ArtifactLink, Run.name).join(Run, Run.id == ArtifactLink.run_id)
    query = query.where(ArtifactLink.version_id.in_(version_ids), NOT_DELETED)
    result: dict[int, dict[str, list[tuple[int, str]]]] = {
        version_id: {MADE: [], USED: []} for version_id in version_ids
    }
    for row, name in session.execute(query.order_by(ArtifactLink.run_id)):
        result[row.version_id][row.role].append((row.run_id, name))
    return result


def of_run(
    session: Session, run_id: int
) -> list[tuple[ArtifactLink, ArtifactVersion, ArtifactCollection]]:
    """List the versions that a run made or used, with their artifacts: those that it used first."""
    query = select(ArtifactLink, ArtifactVersion, ArtifactCollection)
    query = query.join(ArtifactVersion, ArtifactVersion.id == ArtifactLink.version_id)
    query = query.join(ArtifactCollection, ArtifactCollection.id == ArtifactVersion.collection_id)
    query = query.where(ArtifactLink.run_id == run_id)
    query = query.order_by(ArtifactLink.role.desc(), ArtifactCollection.name, ArtifactVersion.id)
    return [(row[0], row[1], row[2]) for row in session.execute(query)]


def _set_new_aliases(
    session: Session, version: ArtifactVersion, *, is_resaved: bool = False
) -> None:
    """Give a complete version the aliases that it is waiting for.

    `latest` stays with a later version whose upload ended first.
    """
    for alias in version.new_aliases:
        row = session.get(ArtifactAlias, (version.collection_id, alias))
        if row is None:
            row = ArtifactAlias(collection_id=version.collection_id, alias=alias)
            session.add(row)
        elif alias == LATEST and not is_resaved:
            holder = session.get_one(ArtifactVersion, row.version_id)
            if holder.number > version.number:
                continue
        row.version_id = version.id
    version.new_aliases = []
    session.flush()


def set_alias(session: Session, version_id: int, alias: str) -> None:
    """Give an alias to a complete version, which another one may lose. Raises Conflict."""
    version, collection = get(session, version_id)
    _lock(session, collection)
    if version.completed_at is None or version.deleted_at is not None:
        raise Conflict(f"{collection.name}:v{version.number} is not complete, or deleted.")
    version.new_aliases = [*version.new_aliases, alias]
    _set_new_aliases(session, version, is_resaved=True)


def remove_alias(session: Session, collection_id: int, alias: str) -> None:
    """Remove an alias. Raises NotFound, Conflict for `latest`."""
    collection = collection_of(session, collection_id)
    _lock(session, collection)
    if alias == LATEST:
        raise Conflict(f"{LATEST!r} is reserved for the newest version; use another alias.")
    row = session.get(ArtifactAlias, (collection_id, alias))
    if row is None:
        raise NotFound(f"The artifact {collection.name} has no alias {alias[:100]!r}.")
    session.delete(row)


def remove(session: Session, version_id: int, *, force: bool = False) -> ArtifactVersion:
    """Delete a version; `latest` goes to the newest other one.

    Raises Conflict if a run that has not ended uses it, or without `force` any other run.
    """
    version, collection = get(session, version_id)
    _lock(session, collection)
    session.refresh(version)
    if version.deleted_at is not None:
        return version
    _check_unused(session, version, f"{collection.name}:v{version.number}", force=force)
    held = session.get(ArtifactAlias, (collection.id, LATEST))
    was_latest = held is not None and held.version_id == version_id
    session.execute(delete(ArtifactAlias).where(ArtifactAlias.version_id == version_id))
    session.execute(delete(ArtifactEntry).where(ArtifactEntry.version_id == version_id))
    version.deleted_at = clock.current(session)
    session.flush()
    session.expire_all()
    newest = select(ArtifactVersion).where(ArtifactVersion.collection_id == collection.id, IS_READY)
    newest = newest.order_by(ArtifactVersion.number.desc()).limit(1)
    if was_latest and (other := session.scalar(newest)) is not None:
        session.add(ArtifactAlias(collection_id=collection.id, alias=LATEST, version_id=other.id))
    return version


def _check_unused(session: Session, version: ArtifactVersion, name: str, *, force: bool) -> None:
    query = select(Run.id, Run.status).join(ArtifactLink, ArtifactLink.run_id == Run.id)
    query = query.where(ArtifactLink.version_id == version.id, ArtifactLink.role == USED)
    with permissions.lift_limit(session):
        users = session.execute(query.where(NOT_DELETED).order_by(Run.id)).all()
    active = [row.id for row in users if row.status not in ENDED]
    if active:
        raise Conflict(f"{name} is in use by run {active[0]}, which has not ended.")
    if users and not force:
        named = ", ".join(str(row.id) for row in users[:5])
        more = f" and {len(users) - 5} more" if len(users) > 5 else ""
        raise Conflict(f"{name} was used by runs {named}{more}: delete it with `force`.")


def _lock(session: Session, collection: ArtifactCollection) -> None:
    query = select(ArtifactCollection.id).where(ArtifactCollection.id == collection.id)
    session.execute(query.with_for_update())


# ---- Blobs ------------------------------------------------------------------------------------


def collect_blobs(database: Database, store: ObjectStore) -> int:
    """Delete stored content that no version refers to; return how many files were deleted."""
    used = exists().where(ArtifactEntry.blob_id == Blob.id)
    with database.writing() as session:
        query = select(Blob.id).where(~used).order_by(Blob.id).limit(MOST_COLLECTED)
        blob_ids = session.scalars(query.with_for_update(skip_locked=True)).all()
    keys: list[str] = []
    for first in range(0, len(blob_ids), BATCH):
        with database.writing() as session:
            locked = select(Blob.id).where(Blob.id.in_(blob_ids[first:][:BATCH]))
            session.execute(locked.order_by(Blob.id).with_for_update())
            # A new statement, so that it sees the entries of transactions that held the lock.
            unused = delete(Blob).where(Blob.id.in_(blob_ids[first:][:BATCH]), ~used)
            keys += session.scalars(unused.returning(Blob.key)).all()
    delete_files(store, keys)
    return len(keys)
