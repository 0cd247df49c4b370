"""Many runs at once."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from app.auth import audit
from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import SIGNED_IN, requires
from app.dependencies import Db
from app.http.parameters import Body, RunId, Text
from app.runs import bulk
from db.access.permissions import Permission
from db.errors import Invalid

router = APIRouter(prefix="/runs", tags=["runs"])


class BulkAction(Body):
    """What is to be done with which runs."""

    action: Annotated[
        Literal["add_tag", "remove_tag", "cancel", "delete", "restore", "erase", "move"],
        Field(description="erase: of runs in the trash, for good; move: to another project"),
    ]
    runs: Annotated[list[RunId], Field(min_length=1, max_length=bulk.MOST_RUNS)]
    tag: Annotated[Text, Field(description="To add or to remove")] = ""
    project: Annotated[Text | None, Field(description="To move to; '' is the first one")] = None


class RefusedRun(BaseModel):
    """A run of which it could not be done."""

    id: int
    detail: Annotated[str, Field(description="The reason, for people")]


class BulkAnswer(BaseModel):
    """Each run is in one of the two."""

    done: list[int]
    refused: list[RefusedRun]


@router.post("/bulk")
@requires(SIGNED_IN, token_permission=Permission.CONTROL_RUN)
@audited("action", "tag", "project")
def act_on_runs(wanted: BulkAction, session: Db, principal: SignedIn) -> BulkAnswer:
    """Do one thing with many runs. What can be done is done; the rest is named with its reason."""
    if bool(wanted.tag.strip()) != (wanted.action in bulk.TAGGING):
        text = f"{wanted.tag[:100]!r} with {wanted.action}; allowed: a text with add_tag, "
        raise Invalid({"tag": text + "remove_tag, and none with the others"})
    if (wanted.project is not None) != (wanted.action == bulk.MOVE):
        said = "none" if wanted.project is None else repr(wanted.project[:100])
        text = (
            f"{said} with {wanted.action}; allowed: a project with move, and none with the others"
        )
        raise Invalid({"project": text})
    done, refused = bulk.act(
        session,
        principal.user,
        wanted.action,
        wanted.runs,
        tag=wanted.tag,
        project=wanted.project or "",
    )
    audit.set_runs(session, done)
    return BulkAnswer(done=done, refused=[RefusedRun(**vars(each)) for each in refused])
