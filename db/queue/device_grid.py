"""Workers × devices: what runs where, and how busy it is."""

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

#: Workers that a page shows, those that are up first; the API has all of them.
MOST_WORKERS = 500


class Cell(NamedTuple):
    """One device. label: its kind and number. run_id: of the run that it is in use for.

    name, status: of that run, where it may be seen.
    utilization: 0 to 1, memory_bytes: in use, temperature_celsius; None where it is not sampled.
    """

    label: str
    device: str
    run_id: int | None
    name: str | None
    status: str
    utilization: float | None
    memory_bytes: int | None
    temperature_celsius: float | None

    @property
    def share(self) -> float:
        """In hundredths, how busy it is, as far as is known."""
        return round(100 * (self.utilization or 0.0))

    @property
    def load(self) -> str:
        """How busy it is, in words; empty where that is not known."""
        busy = None if self.utilization is None else f"{self.share:.0f} %"
        memory = None if self.memory_bytes is None else f"{self.memory_bytes / 2**30:.0f} GiB"
        celsius = self.temperature_celsius
        heat = None if celsius is None else f"{celsius:.0f} °C"
        return " · ".join(filter(None, (busy, memory, heat)))


@dataclass(frozen=True)
class Row:
    """One worker. state: up, silent or stopped.  seen_at: when it is not up."""

    id: int
    name: str
    host: str
    state: str
    seen_at: float | None
    is_drained: bool
    stops: bool
    only_run_id: int | None
    placement: str | None
    cells: tuple[Cell, ...]

    @property
    def mark(self) -> str:
        """Something that changes when what is shown of the worker does."""
        said = (self.name, self.host, self.state, self.seen_at, self.is_drained, self.stops)
        more = (self.only_run_id, self.placement, [tuple(cell) for cell in self.cells])
        return f"{crc32(repr(said + more).encode()):x}"


_COLUMNS = (
    *(Worker.id, Worker.name, Worker.host, Worker.devices, Worker.seen_at, Worker.stopped_at),
    *(Worker.drained_at, Worker.drain_stops, Worker.only_run_id, Worker.placement),
)


def read(session: Session, limit: int = MOST_WORKERS) -> list[Row]:
    """Read it in four queries, however many workers and runs; names of runs as the session may."""
    up = ALIVE.label("is_up")
    query = select(*_COLUMNS, up).where(LASTING).order_by(up.desc(), Worker.name).limit(limit)
    found = session.execute(query).all()
    used: dict[int, dict[int, Any]] = defaultdict(dict)
    nodes = select(RunNode.worker_id, RunNode.run_id, RunNode.node, RunNode.devices).where(
        RunNode.ended_at.is_(None), RunNode.worker_id.in_([row.id for row in found])
    )
    with permissions.unlimited(session):  # a device is in use, whoever sees the run
        nodes_in_use = session.execute(nodes).all()
    for node in nodes_in_use:
        used[node.worker_id].update(dict.fromkeys(node.devices, node))
    run_ids = {node.run_id for devices in used.values() for node in devices.values()}
    seen = {
        row.id: row
        for row in session.execute(select(Run.id, Run.name, Run.status).where(Run.id.in_(run_ids)))
    }
    samples = _samples(session, seen, set().union(*used.values()))
    return [_row(row, used[row.id], seen, samples) for row in found]


def _samples(
    session: Session, run_ids: Collection[int], devices: Collection[int]
) -> dict[tuple[int, int], Any]:
    """Return the latest samples of these runs, by run and device: of their first nodes.

    devices: of any of them, without which all that a run has ever had would be gone through.
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
    seen: Mapping[int, Any],
    samples: Mapping[tuple[int, int], Any],
) -> Row:
    return Row(
        id=row.id,
        name=row.name,
        host=row.host,
        state="up" if row.is_up else "stopped" if row.stopped_at else "silent",
        seen_at=None if row.is_up else row.seen_at,
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
    # What a CPU does is known of its machine as a whole alone, and of a gang's first node.
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
