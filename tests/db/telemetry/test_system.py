"""Thinned samples of the machine."""

from typing import Any

import pytest

from db.database import Database
from db.tables import Run
from db.telemetry import system, telemetry
from db.telemetry.system import DeviceSamples
from halfstep.telemetry.events import Sample


def traffic(second: int) -> dict[str, Any]:
    """Samples with the script's memory and the machine's traffic, without network figures."""
    return {"process_memory_bytes": second, "disk_bytes_per_second": 2.0 * second}


def test_samples_are_thinned_by_device(database: Database, running: Run) -> None:
    """A device's samples in an interval become mean utilization and power, and peak memory."""
    samples = [
        Sample(
            device=device,
            elapsed_ms=1000 * second,
            utilization=0.5 if second % 2 else 1.0,
            memory_bytes=second,
            power_watts=None if device < 0 else 100.0 + second,
            temperature_celsius=None if device < 0 else 60.0 + second,
            **(traffic(second) if device < 0 else {}),
        )
        for second in range(8)
        for device in (-1, 0)
    ]
    with database.writing() as session:
        telemetry.record(session, running.id, 1, telemetry.Flush(samples=samples))
    with database.reading() as session:
        host, gpu = system.of_run(session, running.id, most=4)
        whole = system.of_run(session, running.id)
        assert system.has_samples(session, running.id)
    assert host == DeviceSamples(
        *(-1, [0, 2000, 4000, 6000], [0.75] * 4, [1, 3, 5, 7], *[[None] * 4] * 2),
        *([1, 3, 5, 7], [1.0, 5.0, 9.0, 13.0], [None] * 4),
    )
    assert gpu.process_memory_bytes == [None] * 4
    assert gpu.temperature_celsius == [61.0, 63.0, 65.0, 67.0]
    assert gpu.power_watts == pytest.approx([100.5, 102.5, 104.5, 106.5])
    assert whole[1].elapsed_ms == [1000 * second for second in range(8)]
