"""Routes of named artifacts: save, find, download, compare, alias and delete versions.

A token that uploads watched runs may find and download artifacts, for `watch.use`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import Depends, Path, Query, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from app.artifacts.artifact_uploads import BlobUpload
from app.auth.audit import audited, set_detail, unaudited
from app.auth.authentication import SignedIn, Uploader
from app.auth.permissions import SIGNED_IN, check_project
from app.auth.project_parameters import ListedProject, in_project, query_project
from app.auth.routing import Router
from app.dependencies import Db, TheSettings, ingesting
from app.files.downloads import MEDIA_TYPES, OCTETS, send
from app.files.file_names import without_specials
from app.files.file_uploads import take_file
from app.files.ingest_api import OCTETS as OCTETS_BODY
from app.files.ingest_api import FilePosition, Offset, read_piece
from app.http.active_requests import DOWNLOAD
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, Text
from db.access import projects
from db.access.permissions import Permission
from db.errors import Invalid
from db.files import artifact_versions, storage
from db.files.artifact_lineage import MOST_NODES, lineage
from db.files.object_store import open_store
from db.files.storage import MOST_NAMED
from db.queue import quotas
from db.settings import Settings
from db.tables import LARGEST_COUNT, MADE, USED, ArtifactCollection, ArtifactVersion
from db.telemetry import damage
from halfstep.artifacts import names
from halfstep.artifacts.manifest import Entry

router = Router(tags=["artifacts"])

SHA256 = "^[0-9a-f]{64}$"
Name = Annotated[
    str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", description=names.NAME_ALLOWED)
]
Alias = Annotated[
    str,
    Field(max_length=64, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", description=names.ALIAS_ALLOWED),
]


class RunLink(BaseModel):
    """A run that made or used a version."""

    id: int
    name: str


class VersionSummary(BaseModel):
    """A version of an artifact."""

    id: int
    version: Annotated[str, Field(description="v0, v1, …")]
    digest: Annotated[str, Field(description="SHA-256 of its list of files")]
    size_bytes: int
    files: int
    is_file: Annotated[bool, Field(description="Whether it is a single file instead of a folder")]
    aliases: list[str]
    created_at: float
    is_complete: Annotated[bool, Field(description="Whether all of its files are uploaded")]
    made_by: list[RunLink]
    used_by: list[RunLink]


class ArtifactSummary(BaseModel):
    """A named artifact."""

    id: int
    project: str
    name: str
    type: str
    versions: int
    created_at: float


class ArtifactDetail(ArtifactSummary):
    """A named artifact with its versions, newest first."""

    items: list[VersionSummary]


class ArtifactList(ListPage):
    """A page of artifacts, newest first."""

    artifacts: list[ArtifactSummary]


class VersionFile(BaseModel):
    """A file of a version."""

    path: str
    size_bytes: int
    sha256: str


class VersionDetail(VersionSummary):
    """A version with its artifact and its files."""

    artifact: ArtifactSummary
    entries: list[VersionFile]


class ChangedFile(BaseModel):
    """A file that differs between two versions."""

    path: str
    kind: Annotated[str, Field(description="added, removed or changed")]
    size_before: int | None
    size_after: int | None


class VersionDiff(BaseModel):
    """The files that differ between two versions."""

    before: str
    after: str
    changes: list[ChangedFile]


class LineageNode(BaseModel):
    """A run or a version in the lineage of a version."""

    key: Annotated[str, Field(description="run-1 or version-1")]
    kind: Literal["run", "version"]
    name: str
    layer: Annotated[int, Field(description="Negative: before the version; positive: after it")]


class LineageGraph(BaseModel):
    """Runs and versions before and after a version."""

    nodes: list[LineageNode]
    edges: Annotated[list[tuple[str, str]], Field(description="Keys: from, to")]
    is_cut: Annotated[bool, Field(description=f"Whether there are more than {MOST_NODES} nodes")]


class NewFile(Body):
    """A file of a new version."""

    path: Annotated[str, Field(max_length=names.ENTRY_CHARACTERS)]
    size_bytes: Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
    sha256: Annotated[str, Field(pattern=SHA256)]


class NewVersion(Body):
    """Content to save as a version of an artifact."""

    project: Text = projects.DEFAULT
    name: Name
    type: Name = "artifact"
    is_file: bool = False
    aliases: Annotated[list[Alias], Field(max_length=names.MOST_ALIASES, default_factory=list)]
    files: Annotated[list[NewFile], Field(min_length=1, max_length=names.MOST_FILES)]


class SavedVersion(BaseModel):
    """A saved version: complete once its missing files are uploaded."""

    id: int
    version: str
    is_complete: bool
    missing: Annotated[list[str], Field(description="SHA-256 of the files to upload")]


@router.get("/artifacts", SIGNED_IN)
def list_artifacts(
    session: Db, project: ListedProject, after: After = "", limit: Limit = 100
) -> ArtifactList:
    """List artifacts of the visible projects, newest first."""
    found = artifact_versions.list_artifacts(session, project, after=after, limit=limit)
    counts = artifact_versions.counts(session, [row[0].id for row in found.rows])
    rows = [_summary(row[0], counts) for row in found.rows]
    return ArtifactList(total=found.total, next=found.next, artifacts=rows)


@router.get("/artifacts/version", SIGNED_IN, for_uploads=True)
def find_version(
    session: Db,
    settings: TheSettings,
    name: Text,
    project: Annotated[str, query_project(Permission.VIEW_RUN, default=projects.DEFAULT)],
    version: Annotated[
        Text, Query(description="v3, an alias such as latest, or @ and the start of the digest")
    ] = names.LATEST,
) -> VersionDetail:
    """Return a version by name."""
    try:
        named = names.parse_version(version)
    except ValueError as error:
        raise Invalid({"version": str(error)}) from error
    row, collection = artifact_versions.find(session, project, name, named)
    note_lost_files(session, settings, row.id)
    return _detail(session, row, collection)


@router.get("/artifacts/{collection_id}", SIGNED_IN)
def get_artifact(collection_id: RowId, session: Db) -> ArtifactDetail:
    """Return an artifact with its versions."""
    collection = artifact_versions.collection_of(session, collection_id)
    rows = artifact_versions.versions(session, collection_id)
    summary = _summary(collection, {collection_id: len(rows)})
    return ArtifactDetail(**summary.model_dump(), items=version_summaries(session, rows))


@router.get("/artifact-versions/{version_id}", SIGNED_IN)
def get_version(version_id: RowId, session: Db, settings: TheSettings) -> VersionDetail:
    """Return a version with its files."""
    note_lost_files(session, settings, version_id)
    return _detail(session, *artifact_versions.get(session, version_id))


@router.get("/artifact-versions/{version_id}/diff", SIGNED_IN)
def compare_versions(
    version_id: RowId,
    session: Db,
    against: Annotated[RowId, Query(description="Id of the earlier version")],
) -> VersionDiff:
    """Return the files that differ from another version."""
    after, _ = artifact_versions.get(session, version_id)
    before, _ = artifact_versions.get(session, against)
    changes = artifact_versions.diff(session, against, version_id)
    return VersionDiff(
        before=f"v{before.number}",
        after=f"v{after.number}",
        changes=[ChangedFile(kind=change.kind, **vars(change)) for change in changes],
    )


@router.get("/artifact-versions/{version_id}/lineage", SIGNED_IN)
def get_lineage(version_id: RowId, session: Db) -> LineageGraph:
    """Return the runs and versions before and after a version."""
    artifact_versions.get(session, version_id)
    graph = lineage(session, version_id)
    nodes = [LineageNode(**vars(node)) for node in graph.nodes]
    return LineageGraph(nodes=nodes, edges=graph.edges, is_cut=graph.is_cut)


@router.head("/artifact-versions/{version_id}/files/{path:path}", include_in_schema=False)
@router.get(
    "/artifact-versions/{version_id}/files/{path:path}",
    SIGNED_IN,
    lasts=DOWNLOAD,
    for_uploads=True,
    response_class=Response,
)
def download_version_file(
    version_id: RowId,
    path: str,
    request: Request,
    session: Db,
    settings: TheSettings,
    _principal: SignedIn,
) -> Response:
    """Download a file of a version. Takes Range, If-Range and If-None-Match."""
    version, collection = artifact_versions.get(session, version_id)
    check_project(session, Permission.DOWNLOAD_FILES, collection.project)
    blob = artifact_versions.blob_of(session, version_id, path)
    name = f"{collection.name}-v{version.number}-{without_specials(path.rpartition('/')[2])}"
    media_type = MEDIA_TYPES.get(path.rpartition(".")[2].lower(), OCTETS)
    headers = {
        "Content-Type": media_type,
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    # The content security policy of a note does not allow images of another host.
    is_image = media_type.startswith("image/")
    redirects = settings.presigned_downloads and request.method == "GET" and not is_image
    return send(request, settings, blob, name, headers, redirects=redirects)


@router.post("/artifacts", SIGNED_IN, token_permission=Permission.SUBMIT_RUN, status_code=201)
@audited("project", "name", "type")
def save_version(
    body: Annotated[NewVersion, in_project(NewVersion, Permission.SUBMIT_RUN)],
    session: Db,
    principal: SignedIn,
) -> SavedVersion:
    """Save content as a version; content that the artifact has already makes no new version."""
    for alias in body.aliases:
        check_alias(alias)
    sizes = {(file.sha256, file.size_bytes) for file in body.files}
    known = artifact_versions.find_known_blobs(
        session, body.project, {sha256 for sha256, _ in sizes}
    )
    if new := sizes - known.keys():
        quotas.check_storage(session, body.project, sum(size for _, size in new))
    version = artifact_versions.save(
        session,
        principal.user,
        body.project,
        body.name,
        type=body.type,
        is_file=body.is_file,
        entries=[Entry(file.path, file.size_bytes, file.sha256) for file in body.files],
        aliases=body.aliases,
    )
    missing = {
        entry.sha256
        for entry in artifact_versions.entries(session, version.id)
        if entry.blob_id is None
    }
    return SavedVersion(
        id=version.id,
        version=f"v{version.number}",
        is_complete=version.completed_at is not None,
        missing=sorted(missing),
    )


async def _piece(request: Request, _user: Uploader) -> bytes:
    return await read_piece(request)


UploadedPiece = Annotated[bytes, Depends(_piece)]


async def _blob(
    version_id: RowId,
    sha256: Annotated[str, Path(pattern=SHA256)],
    size: Annotated[int, Query(ge=0, le=LARGEST_COUNT, description="Of the whole file")],
    request: Request,
    _user: Uploader,
) -> BlobUpload:
    return BlobUpload(request.state.grants, version_id, size, sha256)


@router.put(
    "/artifact-versions/{version_id}/blobs/{sha256}",
    SIGNED_IN,
    token_permission=Permission.SUBMIT_RUN,
    openapi_extra=OCTETS_BODY,
)
@unaudited("Content of a version, whose creation is recorded.")
async def upload_blob(
    file: Annotated[BlobUpload, Depends(_blob)],
    offset: Offset,
    request: Request,
    _user: Uploader,
    settings: TheSettings,
    body: UploadedPiece,
) -> FilePosition:
    """Upload a piece of a file of a version, from `offset` of it on."""

    def work() -> int:
        return take_file(settings, request.app.state.database, file, offset, body)

    end = await ingesting(request, work)
    return FilePosition(offset=end, stored=end == file.size_bytes)


@router.put(
    "/artifact-versions/{version_id}/aliases/{alias}",
    SIGNED_IN,
    token_permission=Permission.SUBMIT_RUN,
)
def set_alias(version_id: RowId, alias: Annotated[Alias, Path()], session: Db) -> VersionSummary:
    """Give an alias to a version; another version of the artifact loses it."""
    version, collection = artifact_versions.get(session, version_id)
    check_project(session, Permission.SUBMIT_RUN, collection.project)
    check_alias(alias)
    artifact_versions.set_alias(session, version_id, alias)
    set_detail(session, f"{collection.name}:v{version.number} is {alias}")
    return version_summaries(session, [version])[0]


@router.delete(
    "/artifacts/{collection_id}/aliases/{alias}",
    SIGNED_IN,
    token_permission=Permission.SUBMIT_RUN,
    status_code=204,
)
def remove_alias(collection_id: RowId, alias: Annotated[Alias, Path()], session: Db) -> None:
    """Remove an alias of an artifact."""
    collection = artifact_versions.collection_of(session, collection_id)
    check_project(session, Permission.SUBMIT_RUN, collection.project)
    artifact_versions.remove_alias(session, collection_id, alias)
    set_detail(session, f"{collection.name} without {alias}")


@router.delete(
    "/artifact-versions/{version_id}",
    SIGNED_IN,
    token_permission=Permission.DELETE_RUN,
    status_code=204,
)
def delete_version(
    version_id: RowId,
    session: Db,
    force: Annotated[bool, Query(description="Delete even if ended runs used it")] = False,
) -> None:
    """Delete a version; its content too, within an hour, unless another version has it.

    Error 409 names the runs that use it.
    """
    version, collection = artifact_versions.get(session, version_id)
    check_project(session, Permission.DELETE_RUN, collection.project)
    artifact_versions.remove(session, version_id, force=force)
    set_detail(session, f"{collection.name}:v{version.number}{', forced' if force else ''}")


def check_alias(alias: str) -> None:
    """Check that an alias is not the number of a version. Raises Invalid."""
    if not re.match(names.ALIAS, alias):
        raise Invalid({"alias": f"{alias[:100]!r}: allowed: {names.ALIAS_ALLOWED}"})


def version_summaries(session: Session, rows: Sequence[ArtifactVersion]) -> list[VersionSummary]:
    """Return versions as JSON, with their aliases and runs."""
    aliases = artifact_versions.aliases(session, {row.collection_id for row in rows})
    links = artifact_versions.list_links(session, [row.id for row in rows])
    return [
        VersionSummary(
            id=row.id,
            version=f"v{row.number}",
            digest=row.digest,
            size_bytes=row.size_bytes,
            files=row.files,
            is_file=row.is_file,
            aliases=aliases.get(row.id, []),
            created_at=row.created_at,
            is_complete=row.completed_at is not None,
            made_by=[RunLink(id=run_id, name=name) for run_id, name in links[row.id][MADE]],
            used_by=[RunLink(id=run_id, name=name) for run_id, name in links[row.id][USED]],
        )
        for row in rows
    ]


def note_lost_files(session: Session, settings: Settings, version_id: int) -> None:
    """Let the response name files of a version that are missing from the store."""
    store = open_store(settings, retry_seconds=1.0)
    if lost := storage.list_lost_entries(session, store, version_id):
        more = f" and {len(lost) - MOST_NAMED:,} more" if len(lost) > MOST_NAMED else ""
        named = ", ".join(lost[:MOST_NAMED])
        damage.note_all([f"Files of this version are missing on the server: {named}{more}."])


def _detail(
    session: Session, version: ArtifactVersion, collection: ArtifactCollection
) -> VersionDetail:
    counts = artifact_versions.counts(session, [collection.id])
    files = artifact_versions.entries(session, version.id)
    return VersionDetail(
        **version_summaries(session, [version])[0].model_dump(),
        artifact=_summary(collection, counts),
        entries=[
            VersionFile(path=file.path, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in files
        ],
    )


def _summary(collection: ArtifactCollection, counts: Mapping[int, int]) -> ArtifactSummary:
    return ArtifactSummary(
        id=collection.id,
        project=collection.project,
        name=collection.name,
        type=collection.type,
        versions=counts.get(collection.id, 0),
        created_at=collection.created_at,
    )
