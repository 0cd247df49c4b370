"""Record of an attempt's environment: machine, versions, command, source, git state.

Best effort: unavailable parts are left out, and no run fails because of it. Contains no secrets.
"""

import logging
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import pynvml

from db.database import Database
from db.queue import queue
from db.runs import environments
from db.runs.environments import Texts
from db.tables import Worker
from halfstep import redaction
from halfstep.telemetry.source_state import SourceState, redact
from worker.attempts.renew_lease import wait_for

logger = logging.getLogger(__name__)

Description: TypeAlias = tuple[dict[str, Any], Texts] | None

#: Variables whose values are never shown: a command may have received one of them.
SECRETS = (
    *("HALFSTEP_DATABASE_URL", "HALFSTEP_STORAGE_URL", "HALFSTEP_SMTP_URL"),
    *("PGPASSWORD", "PGPASSFILE"),
)


@dataclass(frozen=True)
class Started:
    """The process to start."""

    command: Sequence[str]
    folder: str | None
    read_state: Callable[[], SourceState]
    hidden: Sequence[str] = ()  # texts never shown


class AttemptEnvironment:
    """Environment of an attempt, which is described in a thread and recorded once."""

    def __init__(
        self, database: Database, run_id: int, attempt: int, describe: Callable[[], Description]
    ) -> None:
        self._database, self._run_id, self._attempt = database, run_id, attempt
        self._describe = describe
        self._future: Future[Description] | None = None  # until it is recorded
        self.has_begun = False

    def begin(self) -> None:
        """Begin to describe it."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="environment")
        self._future, self.has_begun = thread.submit(self._describe), True

    def wait(self, meanwhile: Callable[[], None]) -> Description:
        """Return the description, or None without one; call `meanwhile` until then."""
        return wait_for(self._future.result, meanwhile) if self._future else None

    def record(self, meanwhile: Callable[[], None], *, wait: bool) -> None:
        """Store the description once, if it is available. Raises StaleAttempt."""
        if self._future is None or not (wait or self._future.done()):
            return
        described = self.wait(meanwhile)
        if described is not None:
            with self._database.writing() as session:
                queue.lock_active_attempt(session, self._run_id, self._attempt)
                environments.record(session, self._run_id, self._attempt, *described)
        self._future = None


def try_describe(started: Started, worker: Worker, devices: list[int]) -> Description:
    """Return the environment record, or None if that fails, which is only logged."""
    try:
        return describe(started, worker, devices)
    except Exception:
        logger.exception("the environment of an attempt cannot be described")
        return None


def describe(started: Started, worker: Worker, devices: list[int]) -> tuple[dict[str, Any], Texts]:
    """Return the environment record."""
    hidden = [*started.hidden, *filter(None, map(os.environ.get, SECRETS))]
    state = redact(started.read_state(), *hidden)
    content = {
        "worker": worker.name,
        "host": worker.host,
        "platform": platform.platform(),
        "devices": [device for device in worker.devices if device["index"] in devices],
        "versions": {**worker.versions, "driver": _driver()},
        "command": redaction.command(started.command, *hidden),
        "folder": started.folder,
        "file": msgspec.to_builtins(state.file),
        "git": msgspec.to_builtins(state.git),
        "changed_sources": state.changed,
    }
    return redaction.without(content, *hidden), Texts(state.source, state.diff, state.requirements)


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None
