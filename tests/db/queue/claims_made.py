"""Shared helpers of the tests of claims."""

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.clock import now
from db.database import Database
from db.queue import claims, workers
from db.runs import runs
from db.tables import Run, RunNode, Status, Worker
from tests.db.conftest import CPU, DIGITS

Claimed = tuple[int, int, list[int]]


def add_workers(
    database: Database, *devices: int, torch: str = "2.13.0", prefix: str = "w", **changes: Any
) -> list[Worker]:
    """Register workers with these numbers of devices."""
    with database.writing() as session:
        return [
            workers.register(
                session,
                name=f"{prefix}{number}",
                host=f"{prefix}{number}",
                pid=1,
                devices=[{**CPU, "index": index, **changes} for index in range(count)],
                recipes=[DIGITS],
                versions={"torch": torch},
            )
            for number, count in enumerate(devices)
        ]


def claim(session: Session, worker: Worker, **changes: Any) -> Run | None:
    """Claim a run by a worker whose devices are all free."""
    values: dict[str, Any] = {
        "recipes": ["digits"],
        "precisions": ["fp32", "fp16"],
        "free_devices": range(len(worker.devices)),
        "device_memory_bytes": workers.device_memory_bytes(worker.devices),
        "lease_seconds": 60.0,
    }
    return claims.claim(session, worker.id, **(values | changes))


def nodes(session: Session, run: Run | None) -> list[Claimed]:
    """Return number, worker and devices of the nodes of a run."""
    assert run is not None
    query = select(RunNode).where(RunNode.run_id == run.id, RunNode.attempt == run.attempt)
    found = session.scalars(query.order_by(RunNode.node))
    return [(node.node, node.worker_id or 0, node.devices) for node in found]


def finish(session: Session, run: Run) -> None:
    """End a run and all its nodes."""
    session.execute(update(RunNode).where(RunNode.run_id == run.id).values(ended_at=now()))
    runs.set_status(session, run, Status.FINISHED)
