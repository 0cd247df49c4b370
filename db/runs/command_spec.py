"""The command of a run, as its row and the rows of sweeps store it."""

import msgspec
from msgspec import Struct

from halfstep.telemetry.plain_json import JsonObject


class CommandSpec(Struct, frozen=True, kw_only=True):
    """A command line without a shell; app.submission.command_lines validates a submitted one."""

    line: str  # with placeholders: python train.py --lr {lr}
    folder: str = ""  # on the worker, absolute; with git, within the repository
    git: str = ""  # https://… or file://…; "": the folder is on the worker
    commit: str = ""  # with git: a hash, or its first digits
    patch: str = ""  # with git: changes to apply to the commit
    venv: str = ""  # virtual environment on the worker; "": the worker's own
    variables: dict[str, str] = {}  # environment variables
    secrets: list[str] = []  # names of secrets, which become environment variables too
    # SHA-256 of its code when it was queued, by path within the folder, as the client has read it.
    sources: dict[str, str] = {}
    parameters: dict[str, JsonObject] = {}  # by placeholder, the JSON Schema of its value


def read_command(stored: JsonObject) -> CommandSpec:
    """Return a stored command. Raises ValueError if it is none."""
    return msgspec.convert(stored, CommandSpec)
