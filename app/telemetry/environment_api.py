"""Route of a run's environment."""

from app.auth.routing import Router
from app.dependencies import Db
from app.http.parameters import RunId
from app.telemetry.environment import FullEnvironment, full_environment
from db.access.permissions import Permission
from db.runs import runs

router = Router(prefix="/runs/{run_id}", tags=["runs"])


@router.get("/environment", Permission.VIEW_RUN)
def get_environment(run_id: RunId, session: Db) -> FullEnvironment:
    """Return machine, versions, command, source and git of the latest attempt.

    404 before the first attempt.
    """
    return full_environment(session, runs.get(session, run_id))
