"""Log of server, worker, placer and supervisors: a line per message, as text or JSON.

A message about a run has its id as `extra={"run": id}`.
"""

import json
import logging
from datetime import UTC, datetime
from typing import IO

from halfstep.cli.output import say

#: Packages whose messages go by the configured level; those of other packages from WARNING on.
PACKAGES = ("app", "db", "halfstep", "trainer", "worker")


def configure(process: str, level: str, form: str, stream: IO[str] | None = None) -> None:
    """Send the log of this process to a stream.

    process: name at the start of each line.  level: debug, info, warning or error.  form: text or
    json.  stream: by default stdout.
    """
    handler = _Output(stream)
    handler.setFormatter((_Json if form == "json" else _Text)(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


class _Output(logging.Handler):
    def __init__(self, stream: IO[str] | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        say(self.format(record), self._stream)


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"{process}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Put the run in front of a message about one."""
        run = getattr(record, "run", None)
        if run is not None:
            record.message = f"run {run}: {record.message}"
        return super().formatMessage(record)


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return an object without a line break."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname.lower(), "process": self._process}
        fields |= {"logger": record.name, "message": record.getMessage()}
        if (run := getattr(record, "run", None)) is not None:
            fields["run"] = run
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)
