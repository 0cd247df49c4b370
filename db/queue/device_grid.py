"""Grid of workers and devices with their runs and utilization."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.access import permissions
from db.queue.workers import ALIVE, LASTING
from db.tables import HOST, Run, RunNode, SystemSample, Worker
from halfstep import protocol
from halfstep.number_formats import number, percent
from halfstep.number_formats import size as size_text

#: Workers shown on a page, those that are up first; the API returns all of them.
MOST_WORKERS = 500


class Cell(NamedTuple):
    """One device of a worker. Values that are not sampled are None."""

    label: str  # kind and index
    device: str  # label and model name
    run_id: int | None  # the run that uses it
    name: str | None  # of that run, if it is visible to the session
    status: str  # of that run, if it is visible to the session
    utilization: float | None  # 0 to 1
    memory_bytes: int | None  # in use
    temperature_celsius: float | None

    @property
    def share(self) -> float:
        """Utilization in percent, 0 if unknown."""
        return round(100 * (self.utilization or 0.0))

    @property
    def load(self) -> str:
        """Utilization, memory and temperature as text; empty if unknown."""
        busy = None if self.utilization is None else percent(self.share / 100)
        memory = None if self.memory_bytes is None else size_text(self.memory_bytes)
        celsius = self.temperature_celsius
        heat = None if celsius is None else f"{number(round(celsius))} °C"
        return " · ".join(filter(None, (busy, memory, heat)))


@dataclass(frozen=True)
class Row:
    """One worker with its devices."""

    id: int
    name: str
    host: str
    state: str  # up, silent or stopped
    seen_at: float | None  # None while it is up
    is_outdated: bool
    is_drained: bool
    stops: bool
    only_run_id: int | None
    placement: str | None
    cells: tuple[Cell, ...]

    @property
    def mark(self) -> str:
        """Checksum that changes when the displayed values of the worker change."""
        values = (self.name, self.host, self.state, self.seen_at, self.is_drained, self.stops)
        cells = [tuple(cell) for cell in self.cells]
        more = (self.is_outdated, self.only_run_id, self.placement, cells)
        return f"{crc32(repr(values + more).encode()):x}"


_COLUMNS = (
    *(Worker.id, Worker.name, Worker.host, Worker.devices, Worker.seen_at, Worker.stopped_at),
    *(Worker.drained_at, Worker.drain_stops, Worker.only_run_id, Worker.placement),
    Worker.versions,
)


def read(session: Session, limit: int = MOST_WORKERS) -> list[Row]:
    """Return the grid, in four queries; run names only of runs that the session may see."""
    up = ALIVE.label("is_up")
    query = select(*_COLUMNS, up).where(LASTING).order_by(up.desc(), Worker.name).limit(limit)
    rows = session.execute(query).all()
    used: dict[int, dict[int, Any]] = defaultdict(dict)
    nodes = select(RunNode.worker_id, RunNode.run_id, RunNode.node, RunNode.devices).where(
        RunNode.ended_at.is_(None), RunNode.worker_id.in_([row.id for row in rows])
    )
    with permissions.lift_limit(session):  # a device is in use even if its run is not visible
        nodes_in_use = session.execute(nodes).all()
    for node in nodes_in_use:
        used[node.worker_id].update(dict.fromkeys(node.devices, node))
    run_ids = {node.run_id for devices in used.values() for node in devices.values()}
    seen = {
        row.id: row
        for row in session.execute(select(Run.id, Run.name, Run.status).where(Run.id.in_(run_ids)))
    }
    samples = _samples(session, seen, set().union(*used.values()))
    return [_row(row, used[row.id], seen, samples) for row in rows]


def _samples(
    session: Session, run_ids: Collection[int], devices: Collection[int]
) -> dict[tuple[int, int], object]:
    """Return the latest samples of the runs' first nodes, by run and device.

    devices: limits the query to these; without it every sample of a run would be read.
    """
    of_run = (SystemSample.run_id == Run.id, SystemSample.device == HOST)
    last = select(func.max(SystemSample.elapsed_ms)).where(*of_run).scalar_subquery()
    latest = select(Run.id, last.label("elapsed_ms")).where(Run.id.in_(run_ids)).subquery()
    columns = (SystemSample.utilization, SystemSample.memory_bytes)
    query = select(
        *(SystemSample.run_id, SystemSample.device, *columns), SystemSample.temperature_celsius
    ).join(
        latest,
        (SystemSample.run_id == latest.c.id) & (SystemSample.elapsed_ms == latest.c.elapsed_ms),
    )
    query = query.where(SystemSample.device.in_(devices))
    return {(row.run_id, row.device): row for row in session.execute(query)}


def _row(
    row: Any,
    used: Mapping[int, Any],
    seen: Mapping[int, object],
    samples: Mapping[tuple[int, int], object],
) -> Row:
    return Row(
        id=row.id,
        name=row.name,
        host=row.host,
        state="up" if row.is_up else "stopped" if row.stopped_at else "no contact",
        seen_at=None if row.is_up else row.seen_at,
        is_outdated=not row.stopped_at and not protocol.is_current(row.versions),
        is_drained=row.drained_at is not None,
        stops=row.drain_stops,
        only_run_id=row.only_run_id,
        placement=row.placement,
        cells=tuple(
            _cell(device, used.get(device["index"]), seen, samples)
            for device in ([] if row.placement else row.devices)
        ),
    )


def _cell(
    device: Mapping[str, Any],
    node: Any,
    seen: Mapping[int, Any],
    samples: Mapping[tuple[int, int], Any],
) -> Cell:
    index = int(device["index"])
    label = f"{device['kind']} {index}"
    run = seen.get(node.run_id) if node else None
    # CPU load is sampled only for the machine as a whole, and device load only on node 0.
    is_known = node is not None and node.node == 0 and device["kind"] != "cpu"
    sample = samples.get((node.run_id, index)) if node and is_known else None
    return Cell(
        label=label,
        device=f"{label} {device.get('name') or ''}".strip(),
        run_id=node.run_id if node else None,
        name=run.name if run else None,
        status=run.status if run else "",
        utilization=None if sample is None else sample.utilization,
        memory_bytes=None if sample is None else sample.memory_bytes,
        temperature_celsius=None if sample is None else sample.temperature_celsius,
    )
