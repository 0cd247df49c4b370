"""Health checks for process managers: no sign-in, and no wait for the database."""

from anyio import fail_after, to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from db.errors import DatabaseUnreachable
from halfstep.number_formats import duration

router = APIRouter()

#: Seconds that a readiness check waits for the database's write lock.
READY_SECONDS = 1.0


@router.get("/healthz")
async def healthz() -> JSONResponse:
    """Report that the server process answers, whatever its database does (liveness)."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Report whether the database answers and can be written within a second (readiness)."""
    state = request.app.state
    try:
        with fail_after(READY_SECONDS):
            await to_thread.run_sync(
                state.database.check, abandon_on_cancel=True, limiter=state.readiness_checks
            )
    except TimeoutError:
        problem = (
            f"the database is locked or does not respond: no answer within "
            f"{duration(READY_SECONDS)}"
        )
    except DatabaseUnreachable:
        problem = "the database does not answer"
    else:
        return JSONResponse({"status": "ok", "database": "ok"})
    return JSONResponse({"status": "unavailable", "database": problem}, status_code=503)
