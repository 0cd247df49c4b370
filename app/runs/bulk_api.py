"""Route of bulk actions on runs."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN
from app.auth.project_parameters import in_project
from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import Body, RunId, Text
from app.runs import bulk
from db.access.permissions import Permission
from db.errors import Invalid

router = Router(prefix="/runs", tags=["runs"])


class BulkAction(Body):
    """An action and the runs to apply it to."""

    action: Literal["add_tag", "remove_tag", "cancel", "delete", "restore", "erase", "move"]
    """erase: delete runs in the trash permanently; move: to another project"""
    runs: Annotated[list[RunId], Field(min_length=1, max_length=bulk.MOST_RUNS)]
    tag: Annotated[Text, Field(description="Tag to add or remove")] = ""
    project: Text | None = None
    """Destination; '' is the Default project"""


class RefusedRun(BaseModel):
    """A run for which the action failed."""

    id: int
    detail: Annotated[str, Field(description="Reason, for display")]


class BulkResult(BaseModel):
    """Outcome of each run: each is in one of the two lists."""

    done: list[int]
    refused: list[RefusedRun]


@router.post("/bulk", SIGNED_IN, token_permission=Permission.CONTROL_RUN)
@audited("action", "tag", "project")
def act_on_runs(
    body: Annotated[BulkAction, in_project(BulkAction, Permission.MOVE_RUN)],
    session: Db,
    principal: SignedIn,
) -> BulkResult:
    """Apply one action to many runs; runs for which it fails are returned with the reason."""
    if bool(body.tag.strip()) != (body.action in bulk.TAGGING):
        text = f"{body.tag[:100]!r} with {body.action}; allowed: a text with add_tag, "
        raise Invalid({"tag": text + "remove_tag, and none with the others"})
    if (body.project is not None) != (body.action == bulk.MOVE):
        value = "none" if body.project is None else repr(body.project[:100])
        text = f"{value} with {body.action}; allowed: a project with move, and none with the others"
        raise Invalid({"project": text})
    done, refused = bulk.act(
        session,
        principal.user,
        body.action,
        body.runs,
        tag=body.tag,
        project=body.project or "",
    )
    audit.set_runs(session, done)
    return BulkResult(done=done, refused=[RefusedRun(**vars(run)) for run in refused])
