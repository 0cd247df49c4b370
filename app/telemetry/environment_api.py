"""Route of a run's environment."""

from fastapi import APIRouter

from app.auth.authentication import SignedIn
from app.auth.permissions import requires
from app.dependencies import Db
from app.http.parameters import RunId
from app.telemetry.environment import FullEnvironment, full_environment
from db.access.permissions import Permission
from db.runs import runs

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"])


@router.get("/environment")
@requires(Permission.VIEW_RUN)
def get_environment(run_id: RunId, session: Db, _principal: SignedIn) -> FullEnvironment:
    """Return machine, versions, command, source and git of the latest attempt.

    404 before the first attempt.
    """
    return full_environment(session, runs.get(session, run_id))
