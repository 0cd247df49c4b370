"""Pages of artifacts: the list, and one with its versions, files, differences and lineage."""

from typing import Annotated

from fastapi import Form, Query
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.artifacts.artifacts_api import check_alias, note_lost_files, version_summaries
from app.artifacts.lineage import address_of, drawing
from app.auth.audit import audited, set_detail
from app.auth.permissions import SIGNED_IN, check_project
from app.auth.project_parameters import VisibleProject
from app.auth.routing import Router
from app.dependencies import Db
from app.html.rendering import Context
from app.http.list_pages import After
from app.http.parameters import FormText, RowId
from db.access.permissions import Permission
from db.errors import Conflict, Invalid
from db.files import artifact_versions
from db.files.artifact_lineage import lineage

router = Router()

PAGE_SIZE = 50
FILES_SHOWN = 500


@router.get("/artifacts", SIGNED_IN)
def show_artifacts(context: Context, project: VisibleProject, after: After = "") -> HTMLResponse:
    """Show the artifacts of one or all visible projects."""
    found = artifact_versions.list_artifacts(context.session, project, after=after, limit=PAGE_SIZE)
    rows = [row[0] for row in found.rows]
    return context.render(
        "artifacts/artifacts.html",
        project=project,
        rows=rows,
        newest=artifact_versions.newest(context.session, [row.id for row in rows]),
        counts=artifact_versions.counts(context.session, [row.id for row in rows]),
        older=found.next,
    )


@router.get("/artifacts/{collection_id}", SIGNED_IN)
def show_artifact(collection_id: RowId, session: Db) -> RedirectResponse:
    """Redirect to the newest version of an artifact."""
    artifact_versions.collection_of(session, collection_id)
    newest = artifact_versions.newest(session, [collection_id]).get(collection_id)
    address = f"/artifact-versions/{newest.id}" if newest else "/artifacts"
    return RedirectResponse(address, status_code=303)


@router.get("/artifact-versions/{version_id}", SIGNED_IN)
def show_version(
    version_id: RowId, context: Context, against: Annotated[RowId | None, Query()] = None
) -> HTMLResponse:
    """Show a version of an artifact among its other versions. against: compare with this one."""
    note_lost_files(context.session, context.settings, version_id)
    return _version(context, version_id, against=against)


@router.post("/artifact-versions/{version_id}/alias", SIGNED_IN)
@audited("alias")
def set_alias(version_id: RowId, context: Context, alias: FormText = "") -> Response:
    """Give an alias to a version."""
    version, collection = artifact_versions.get(context.session, version_id)
    check_project(context.session, Permission.SUBMIT_RUN, collection.project)
    try:
        check_alias(alias)
        artifact_versions.set_alias(context.session, version_id, alias)
    except (Conflict, Invalid) as error:
        return _version(context, version_id, error=str(error))
    done = f"{collection.name}:v{version.number} is {alias} now."
    return context.redirect(f"/artifact-versions/{version_id}", done)


@router.post("/artifact-versions/{version_id}/deletion", SIGNED_IN)
def delete_version(
    version_id: RowId, context: Context, force: Annotated[bool, Form()] = False
) -> Response:
    """Delete a version. force: although runs that have ended used it."""
    version, collection = artifact_versions.get(context.session, version_id)
    check_project(context.session, Permission.DELETE_RUN, collection.project)
    try:
        artifact_versions.remove(context.session, version_id, force=force)
    except Conflict as error:
        return _version(context, version_id, error=str(error))
    set_detail(context.session, f"{collection.name}:v{version.number}{', forced' if force else ''}")
    done = f"{collection.name}:v{version.number} is deleted."
    return context.redirect(f"/artifacts/{collection.id}", done)


def _version(
    context: Context, version_id: int, *, against: int | None = None, error: str = ""
) -> HTMLResponse:
    session = context.session
    version, collection = artifact_versions.get(session, version_id)
    rows = version_summaries(session, artifact_versions.versions(session, collection.id))
    [shown] = version_summaries(session, [version])
    files = artifact_versions.entries(session, version_id)
    graph = lineage(session, version_id)
    before = artifact_versions.get(session, against)[0] if against else None
    may = context.principal.grants.may
    return context.render(
        "artifacts/artifact.html",
        status_code=409 if error else 200,
        artifact=collection,
        version=shown,
        is_deleted=version.deleted_at is not None,
        versions=rows,
        files=files[:FILES_SHOWN],
        before=before,
        changes=artifact_versions.diff(session, against, version_id) if against else [],
        graph=graph,
        drawing=drawing(graph) if graph.edges else "",
        address_of=address_of,
        may_download=may(Permission.DOWNLOAD_FILES, collection.project),
        may_alias=may(Permission.SUBMIT_RUN, collection.project),
        may_delete=may(Permission.DELETE_RUN, collection.project),
        error=error,
    )
