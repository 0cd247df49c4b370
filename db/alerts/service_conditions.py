"""Conditions of alert rules on the service itself: workers, queue, disk and backups."""

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.health import monitoring_metrics
from db.queue import workers
from db.tables import NOT_DELETED, AlertRule, Run, RunStatus, Status
from halfstep.number_formats import duration, number, quantity


@dataclass(frozen=True)
class Service:
    """Data for evaluating the conditions."""

    session: Session
    moment: float
    folder: Path  # the data folder of this server


#: The condition's subjects for which it is true, with texts: names of workers or projects, this
#: server's host, or "".
Found = dict[str, str]


class ServiceCondition(NamedTuple):
    """A condition on the service."""

    label: str  # "so many" stands for the rule's number
    find: Callable[[AlertRule, Service], Found]
    value: str = ""  # meaning of the rule's number, empty if it has none
    is_of_server: bool = False  # each server finds only its own subject
    page: str = "workers"  # that an alert links to
    has_metric: bool = False


def _silent(rule: AlertRule, service: Service) -> Found:
    rows = service.session.execute(monitoring_metrics.LASTING_WORKERS)
    seconds = (rule.value or 0.0) * 60
    return {
        name: f"Worker {name} has not reported for {duration(service.moment - seen_at)}"
        for name, seen_at in rows
        if service.moment - seen_at >= seconds
    }


def _find_outdated_workers(_rule: AlertRule, service: Service) -> Found:
    return {
        worker.name: workers.describe_outdated([worker]).removesuffix(".")
        for worker in workers.alive(service.session)
        if workers.is_outdated(worker)
    }


def _stuck(rule: AlertRule, service: Service) -> Found:
    seconds = (rule.value or 0.0) * 60
    started = select(RunStatus.time).where(RunStatus.status == Status.RUNNING)
    last = service.session.scalar(started.order_by(RunStatus.id.desc()).limit(1)) or 0.0
    if service.moment - last < seconds:
        return {}
    waiting = monitoring_metrics.waiting(service.session, service.moment)
    return {
        project: f"{quantity(runs, 'run')} of {project} wait in the queue, the first for "
        f"{duration(wait)}; meanwhile no run has started"
        for project, (runs, wait) in waiting.items()
        if wait >= seconds
    }


def _disk(rule: AlertRule, service: Service) -> Found:
    try:
        free = shutil.disk_usage(service.folder).free
    except OSError as error:
        return {host(): f"The data folder of {host()} cannot be read: {error.strerror}"}
    if free >= (rule.value or 0.0) * 1e9:
        return {}
    what = f"{number(free / 1e9)} GB free, less than {number(rule.value or 0.0)} GB"
    return {host(): f"The disk of the data folder of {host()} has {what}"}


def _old_backup(rule: AlertRule, service: Service) -> Found:
    at = service.session.scalar(monitoring_metrics.LAST_BACKUP)
    if at is None:
        return {"": "There is no complete backup"}
    if service.moment - at < (rule.value or 0.0) * 3600:
        return {}
    return {"": f"The newest complete backup is {duration(service.moment - at)} old"}


def _find_failed_backup(_rule: AlertRule, service: Service) -> Found:
    error = service.session.scalar(monitoring_metrics.LAST_ERROR)
    return {"": f"The newest backup failed: {error.rstrip('.')}"} if error else {}


def _find_damaged_runs(_rule: AlertRule, service: Service) -> Found:
    query = select(Run.id, Run.damage).where(Run.damage != "", NOT_DELETED)
    return {
        f"run {run_id}": text.removesuffix(".") for run_id, text in service.session.execute(query)
    }


def host() -> str:
    """Return the name of this server's host."""
    return socket.gethostname()


#: By name, in the order of the page.
SERVICE_CONDITIONS: dict[str, ServiceCondition] = {
    "worker_silent": ServiceCondition(
        "a worker does not report for so many minutes", _silent, "minutes"
    ),
    "worker_outdated": ServiceCondition(
        "a worker has another version than the server", _find_outdated_workers
    ),
    "queue_stuck": ServiceCondition(
        "runs wait, and none starts for so many minutes", _stuck, "minutes"
    ),
    "disk_low": ServiceCondition(
        *("the disk of the data folder has less than so many GB free", _disk, "GB"),
        is_of_server=True,
        page="storage",
    ),
    "backup_old": ServiceCondition(
        *("the newest complete backup is older than so many hours", _old_backup, "hours"),
        page="storage",
    ),
    "backup_failed": ServiceCondition("a backup fails", _find_failed_backup, page="storage"),
    "run_damaged": ServiceCondition(
        "steps, metrics or files of a run cannot be read", _find_damaged_runs, page="runs"
    ),
}
