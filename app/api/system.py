"""How busy the machine was during a run."""

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from app.auth import SignedIn
from app.context import Db
from app.parameters import RunId
from db import runs, system

router = APIRouter(prefix="/runs/{run_id}", tags=["series"])


class DeviceSamples(BaseModel):
    """Columns by time since the run's start, about 500 points. Device -1 is the host itself.

    utilization (0 to 1) and power_watts are means, memory_bytes is the highest.
    """

    model_config = ConfigDict(from_attributes=True)

    device: int
    elapsed_ms: list[int]
    utilization: list[float | None]
    memory_bytes: list[int | None]
    power_watts: list[float | None]


@router.get("/system")
def get_system(run_id: RunId, session: Db, _visitor: SignedIn) -> list[DeviceSamples]:
    """Return how busy the host and each GPU of the run were."""
    runs.get(session, run_id)
    return [DeviceSamples.model_validate(each) for each in system.of_run(session, run_id)]
