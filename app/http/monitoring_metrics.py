"""Prometheus metrics at /metrics, with a separate token.

Values of the database are read at each scrape, so all servers of a database report the same;
requests, streams, disk and process are of the server that is scraped.
"""

import hmac
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    registry.register(_OfServer(request.app.state.live.count, settings.data))
    registry.register(request.app.state.request_metrics)
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
        yield from self._collect_for_operators(self.readings)

    def _collect_for_operators(self, readings: Readings) -> Iterator[Metric]:
        counts = {project: count for project, (count, _) in readings.waiting.items()}
        waits = {project: seconds for project, (_, seconds) in readings.waiting.items()}
        yield _gauges("queue_project_runs", "Queued runs by project", "project", counts)
        text = "Longest wait of a queued run by project"
        yield _gauges("queue_wait_seconds", text, "project", waits)
        text = "Time since the last report of each worker that was not stopped"
        yield _gauges("worker_silence_seconds", text, "worker", readings.silent)
        text = "Workers that are up and have another version than this server"
        yield _gauge("workers_outdated", text, readings.outdated)
        text = "Runs of which steps, metrics or files cannot be read"
        yield _gauge("runs_damaged", text, readings.damaged)
        yield _gauge("database_bytes", "Size of the database", readings.database_bytes)
        text = "Whether the newest backup failed"
        yield _gauge("backup_failed", text, int(readings.has_backup_failed))
        if readings.backup_at is not None:
            text = "Unix time of the newest complete backup"
            yield _gauge("backup_timestamp_seconds", text, readings.backup_at)


class _OfServer(Collector):
    """Values of this server alone, which need no database."""

    def __init__(self, streams: int, folder: Path) -> None:
        self.streams, self.folder = streams, folder

    def collect(self) -> Iterator[Metric]:
        yield _gauge("streams", "Open live streams of this server", self.streams)
        try:
            disk = shutil.disk_usage(self.folder)
        except OSError:  # a mount that is gone
            return
        yield _gauge("disk_free_bytes", "Free space of the data folder's disk", disk.free)
        yield _gauge("disk_bytes", "Size of the data folder's disk", disk.total)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"halfstep_{name}", text, value)


def _gauges(name: str, text: str, by: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"halfstep_{name}", text, labels=[by])
    for label, value in values.items():
        family.add_metric([label], value)
    return family
