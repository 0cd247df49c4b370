"""A spool on a disk that is full for a while, simulated by a file size limit."""

from pathlib import Path

import numpy as np
import pytest

from halfstep.telemetry import patient_spool
from halfstep.telemetry.events import Event
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.spool import STEP_DTYPE, SpoolReader, Steps
from tests.halfstep.telemetry.patient_spool_made import full
from tests.spool_made import event_of, fields_of


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    time = [100.0]
    monkeypatch.setattr(patient_spool, "clock", lambda: time[0])
    return time


def steps(first: int, count: int = 5) -> Steps:
    records = np.zeros(count, STEP_DTYPE)
    records["step"] = range(first, first + count)
    return records


def metric(step: int) -> Event:
    return {"event": "metric", "step": step, "name": "a", "value": 1.0, "elapsed_ms": 0}


def test_it_continues_in_a_new_file_and_counts_losses(tmp_path: Path, now: list[float]) -> None:
    """A full disk and its recovery are reported once; steps before and after are complete."""
    said: list[str] = []
    spool = PatientSpool(tmp_path, 1, said.append)
    spool.steps(steps(1))
    written = (tmp_path / "1-0.spool").stat().st_size
    with full(written + 20):
        spool.steps(steps(6))  # half a frame
        spool.event(event_of(metric(10)))  # too early to try again
        now[0] += patient_spool.RETRY_SECONDS
    with full(4):
        spool.steps(steps(11))  # not even a header
    assert [path.name for path in tmp_path.iterdir()] == ["1-0.spool"]
    now[0] += patient_spool.RETRY_SECONDS
    spool.steps(steps(16))
    spool.event(event_of(metric(20)))
    spool.close()
    lost = "10 steps and 1 events were lost"
    assert said == [
        "the spool cannot be written; data is lost until it can: [Errno 27] File too large",
        f"the spool can be written again: {lost}",
    ]
    reader, found, result = SpoolReader(tmp_path), [], []
    while items := reader.poll():
        for item in items:
            if isinstance(item, np.ndarray):
                found += item["step"].tolist()
            else:
                result.append(fields_of(item))
    assert found == [*range(1, 6), *range(16, 21)]
    assert [event["event"] for event in result] == ["failed_diagnosis", "metric"]
    assert (result[0]["diagnosis"], result[0]["error"], result[0]["step"]) == ("spool", lost, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"1-0.spool", "1-1.spool"}


def test_a_disk_that_stays_full_is_reported_at_the_end(tmp_path: Path, now: list[float]) -> None:
    """A disk that stays full is reported when the spool is closed, without an exception."""
    said: list[str] = []
    spool = PatientSpool(tmp_path, 1, said.append)
    with full(20):
        spool.steps(steps(1))
        now[0] += patient_spool.RETRY_SECONDS
        spool.steps(steps(6))
        spool.close()
    assert len(said) == 2
    assert said[-1] == "the spool still could not be written: 10 steps and 0 events were lost"


def test_a_spool_that_cannot_be_begun_raises(tmp_path: Path) -> None:
    """A spool that exists already raises, because the folder may be another attempt's."""
    PatientSpool(tmp_path, 1, print).close()
    with pytest.raises(FileExistsError):
        PatientSpool(tmp_path, 1, print)
