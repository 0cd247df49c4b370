"""Downsampled device utilization, memory, power and temperature of a run."""

from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.tables import SystemSample


@dataclass(frozen=True)
class DeviceSamples:
    """Samples of one device as columns in order of time; None: value not reported."""

    device: int  # -1 is the host
    elapsed_ms: list[int] = field(default_factory=list)
    utilization: list[float | None] = field(default_factory=list)
    memory_bytes: list[int | None] = field(default_factory=list)
    power_watts: list[float | None] = field(default_factory=list)
    temperature_celsius: list[float | None] = field(default_factory=list)
    process_memory_bytes: list[int | None] = field(default_factory=list)
    disk_bytes_per_second: list[float | None] = field(default_factory=list)
    network_bytes_per_second: list[float | None] = field(default_factory=list)


def of_run(session: Session, run_id: int, *, most: int = 500) -> list[DeviceSamples]:
    """Return about `most` points per device.

    A point has the mean of utilization, power and traffic, and the maximum of memory and
    temperature.
    """
    column: Any = SystemSample
    mine = column.run_id == run_id
    last = session.scalar(select(func.max(column.elapsed_ms)).where(mine)) or 0
    stretch = column.elapsed_ms // (last // most + 1)
    query = (
        select(
            column.device,
            func.min(column.elapsed_ms),
            func.avg(column.utilization),
            func.max(column.memory_bytes),
            func.avg(column.power_watts),
            func.max(column.temperature_celsius),
            func.max(column.process_memory_bytes),
            func.avg(column.disk_bytes_per_second),
            func.avg(column.network_bytes_per_second),
        )
        .where(mine)
        .group_by(column.device, stretch)
        .order_by(column.device, func.min(column.elapsed_ms))
    )
    devices: dict[int, DeviceSamples] = {}
    columns = [column.name for column in fields(DeviceSamples)][1:]
    for device, *values in session.execute(query):
        samples = devices.setdefault(device, DeviceSamples(device))
        for name, value in zip(columns, values, strict=True):
            getattr(samples, name).append(value)
    return list(devices.values())


def has_samples(session: Session, run_id: int) -> bool:
    """Return whether a run has samples of two times, which a chart needs."""
    times = select(SystemSample.elapsed_ms).where(SystemSample.run_id == run_id).distinct().limit(2)
    return len(session.scalars(times).all()) == 2
