"""Metrics of a run in the form of earlier versions, a row for each point."""

from sqlalchemy import delete, insert

from db.database import Database
from db.tables import Metric, MetricBlock, MetricBucket, MetricTail, Run, StepConversion
from db.telemetry.metric_blocks import Point
from tests.db.telemetry.telemetry_made import read_logged_points


def as_rows(database: Database, run: Run) -> list[Point]:
    """Store all points of a run as rows, in order of recording; return them."""
    with database.writing() as session:
        points = read_logged_points(session, run.id)
        for table in (MetricBlock, MetricTail):
            session.execute(delete(table).where(table.run_id == run.id))
        rows = [
            point._asdict() | {"run_id": run.id, "value": None if is_nan else point.value}
            for point in sorted(points, key=lambda point: (point.elapsed_ms, point.name))
            for is_nan in (point.value != point.value,)
        ]
        session.execute(insert(Metric), rows)
        bucket = {"run_id": run.id, "size": 64, "bucket": 0, "summary": b""}
        session.add_all(MetricBucket(**bucket, name=name) for name in {p.name for p in points})
        conversion = session.get(StepConversion, run.id)
        if conversion is None:
            conversion = StepConversion(run_id=run.id, is_verified=True)
            session.add(conversion)
        conversion.metrics_wait = True
    return points
