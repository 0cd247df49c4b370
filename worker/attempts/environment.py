"""Record of an attempt's environment: machine, versions, command, source, git state.

Best effort: unavailable parts are left out, and no run fails because of it. Contains no secrets.
"""

import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pynvml

from db.runs.environments import Texts
from db.tables import Worker
from halfstep import redaction
from halfstep.telemetry.source_state import SourceState, redact

logger = logging.getLogger(__name__)

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


def try_describe(
    started: Started, worker: Worker, devices: list[int]
) -> tuple[dict[str, Any], Texts] | None:
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
