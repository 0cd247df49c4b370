"""Git state, packages and source of a watched script, which its sidecar records."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from halfstep.sidecar.arguments import Arguments
from halfstep.telemetry import refuge
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import write_message
from halfstep.telemetry.source_state import read_state, redact, requirements


def describe(files: AttemptFiles, arguments: Arguments, hidden: Sequence[str]) -> None:
    """Write the description of an attempt; a failure costs only that."""
    script = Path(arguments.script) if arguments.script else None
    with suppress(Exception):
        state = read_state(
            script if arguments.keeps_code else None,
            Path.cwd(),
            script_folder=script.parent if script else None,
            is_trusted=False,
        )
        state = redact(replace(state, requirements=requirements()), *hidden)
        try:
            write_message(files.description, state)
        except OSError:
            write_message(refuge.open_refuge(files.folder) / files.description.name, state)
