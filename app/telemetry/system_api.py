"""Route of a run's system samples."""

from pydantic import BaseModel, ConfigDict

from app.auth.routing import Router
from app.dependencies import Db
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import RunId
from db.access.permissions import Permission
from db.paging import page_of_list
from db.runs import runs
from db.telemetry import system

router = Router(prefix="/runs/{run_id}", tags=["series"])


class DeviceSamples(BaseModel):
    """Columns by time since the run's start, about 500 points. Device -1 is the host itself.

    utilization (0 to 1), power_watts and bytes per second are means, memory and temperature are
    maxima. Process memory is that of a watched script with its child processes; it, disk and
    network traffic are of device -1.
    """

    model_config = ConfigDict(from_attributes=True)

    device: int
    elapsed_ms: list[int]
    utilization: list[float | None]
    memory_bytes: list[int | None]
    power_watts: list[float | None]
    temperature_celsius: list[float | None]
    process_memory_bytes: list[int | None]
    disk_bytes_per_second: list[float | None]
    network_bytes_per_second: list[float | None]


class SystemSamples(ListPage):
    """Samples of the host, then of each GPU."""

    devices: list[DeviceSamples]


@router.get("/system", Permission.VIEW_RUN)
def get_system(run_id: RunId, session: Db, after: After = "", limit: Limit = 1000) -> SystemSamples:
    """Return the utilization of the host and of each GPU of the run."""
    runs.get(session, run_id)
    page = page_of_list(system.of_run(session, run_id), after=after, limit=limit)
    devices = [DeviceSamples.model_validate(row) for row in page.rows]
    return SystemSamples(devices=devices, total=page.total, next=page.next)
