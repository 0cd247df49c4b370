"""Prometheus metrics at /metrics, with a separate token.

Values are read at each scrape, so all servers of a database report the same.
"""

import hmac
import time
from collections.abc import Iterator

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError

from app.dependencies import TheDatabase, TheSettings
from app.http.credentials import bearer_token
from db.database import is_outage
from db.errors import InvalidCredentials, NotFound
from db.health import monitoring_metrics
from db.health.monitoring_metrics import Readings
from db.tables import Status

router = APIRouter(include_in_schema=False)


def _scraper(request: Request, settings: TheSettings) -> None:
    token = settings.metrics_token.get_secret_value()
    if not token:
        raise NotFound("Metrics are disabled: set HALFSTEP_METRICS_TOKEN.")
    sent = bearer_token(request) or ""
    if not hmac.compare_digest(sent.encode(), token.encode()):
        raise InvalidCredentials('Send HALFSTEP_METRICS_TOKEN as "Authorization: Bearer ...".')


@router.get("/metrics", dependencies=[Depends(_scraper)])
def metrics(request: Request, settings: TheSettings, database: TheDatabase) -> Response:
    """Return the metrics; without a database only that it is down."""
    start, readings = time.perf_counter(), None
    try:
        with database.reading() as session:
            readings = monitoring_metrics.read(session, **settings.per_user)
    except DBAPIError as error:
        if not is_outage(error):
            raise
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(readings, time.perf_counter() - start))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"Content-Type": media_type})


class _Collector(Collector):
    def __init__(self, readings: Readings | None, seconds: float) -> None:
        self.readings, self.seconds = readings, seconds

    def collect(self) -> Iterator[Metric]:
        yield _gauge("database_up", "Whether the database answers", int(self.readings is not None))
        if self.readings is None:
            return
        yield _gauge("database_read_seconds", "Duration of reading these metrics", self.seconds)
        yield _gauge("workers_up", "Workers that are up", self.readings.workers)
        runs = {str(status): self.readings.runs[status] for status in Status}
        yield _gauges("runs", "Runs, without those in the trash", "status", runs)
        waiting = {reason: self.readings.queued[reason] for reason in monitoring_metrics.REASONS}
        yield _gauges("queue_runs", "Queued runs by pending reason", "reason", waiting)
        busy = {kind: self.readings.busy[kind] for kind in self.readings.devices}
        devices = dict(self.readings.devices)
        yield _gauges("devices", "Devices of workers that are up", "kind", devices)
        yield _gauges("devices_busy", "Devices in use by runs", "kind", busy)
        for name, text, count in (
            ("steps_recorded", "Steps recorded", self.readings.steps),
            ("steps_skipped", "Recorded steps that the scaler skipped", self.readings.skips),
        ):
            yield CounterMetricFamily(f"halfstep_{name}", text, count)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"halfstep_{name}", text, value)


def _gauges(name: str, text: str, by: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"halfstep_{name}", text, labels=[by])
    for label, value in values.items():
        family.add_metric([label], value)
    return family
