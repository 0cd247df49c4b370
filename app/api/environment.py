"""What a run was started in."""

from fastapi import APIRouter

from app.auth import SignedIn
from app.context import Db
from app.environment import FullEnvironment, full_environment
from app.parameters import RunId
from app.rights import requires
from db import runs
from db.rights import Right

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"])


@router.get("/environment")
@requires(Right.SEE)
def get_environment(run_id: RunId, session: Db, _visitor: SignedIn) -> FullEnvironment:
    """Return machine, versions, command, source and git of the latest attempt; 404 before it."""
    return full_environment(session, runs.get(session, run_id))
