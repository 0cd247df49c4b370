"""Sidecar of this process, which keeps its output and samples the machine.

It outlives its run: an exception's traceback is printed after the run's end.
"""

import os
from pathlib import Path
from typing import Any

from halfstep import redaction
from halfstep.session import arguments, ranks
from halfstep.session.queued_run import FOLDER
from halfstep.sidecar.capture import Sidecar, is_interactive
from halfstep.telemetry.attempt_files import AttemptFiles

_sidecar: Sidecar | None = None


def purposes(*, console: bool, system: bool) -> tuple[bool, bool]:
    """Return whether to capture the output, and to sample the machine. Raises ValueError."""
    captures = arguments.switch("console", console) and not is_interactive()
    return captures, arguments.switch("system", system)


def hidden_texts(secret: str | None) -> list[str]:
    """Return the texts that no kept output may contain. secret: the server's token."""
    return redaction.values(os.environ) + ([secret] if secret else [])


def start(files: AttemptFiles | None, **named: Any) -> Sidecar:
    """Start the sidecar; arguments: those of its class. Raises OSError."""
    global _sidecar
    _sidecar = Sidecar(files, **named)
    return _sidecar


def keep_rank(
    number: int, folder: Path, secret: str | None, *, console: bool, system: bool
) -> None:
    """Keep output, memory and exception of a further rank for the run of the first one.

    secret: the server's token.
    """
    captures, samples = purposes(console=console, system=system)
    if _sidecar or os.environ.get(FOLDER):  # of a queue: its worker has all output
        return
    meeting, hidden = ranks.meeting_file(folder), hidden_texts(secret)
    ranks.report_exceptions(meeting, number, hidden)
    if captures or samples:
        named = {"hidden": hidden, "rank": number, "meeting": meeting}
        start(None, captures=captures, samples=samples, **named)


def stop() -> None:
    """Stop the sidecar, if there is one."""
    if _sidecar:
        _sidecar.stop()


def _after_fork() -> None:
    if _sidecar:
        _sidecar.leave()


os.register_at_fork(after_in_child=_after_fork)
