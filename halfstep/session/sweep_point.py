"""The point of a sweep for which an agent started this script.

The agent writes the claimed point to a file and names it in the environment. The first call of
`watch` takes the file, and its run is that of the point: name, project and settings are the
sweep's. Other calls, in this process or in others, begin runs of their own. When the server
refuses more data of the run, because its sweep has pruned it or a user has ended it, its uploader
leaves a file for the agent.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

#: Environment variable with the path of the file.
FILE = "HALFSTEP_SWEEP_POINT"


class SweepPoint(NamedTuple):
    """A claimed point."""

    watch_id: str  # identifier of its run on the server
    name: str
    project: str
    config: dict[str, Any]  # with the point's settings

    @classmethod
    def take(cls) -> Self | None:
        """Take the point, or return None if there is none, or another call has taken it."""
        named = os.environ.get(FILE)
        if not named:
            return None
        path = Path(named)
        taken = path.with_suffix(".taken")
        with suppress(FileNotFoundError):
            path.rename(taken)  # atomic: one of several processes gets it
            content = json.loads(taken.read_text())
            return cls(**{name: content[name] for name in cls._fields})
        return None

    def write(self, path: Path) -> None:
        """Write the file that a script takes."""
        path.write_text(json.dumps(self._asdict()))


def is_waiting() -> bool:
    """Return whether a point waits for the first call of `watch`."""
    named = os.environ.get(FILE)
    return bool(named) and Path(str(named)).exists()


def project() -> str | None:
    """Return the project of the point, also once another rank has taken it; None without one."""
    named = os.environ.get(FILE)
    for path in (Path(named), Path(named).with_suffix(".taken")) if named else ():
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads(path.read_text())["project"])
    return None


def was_taken(path: Path) -> bool:
    """Return whether a script has taken the point of a file."""
    return path.with_suffix(".taken").exists()


def note_end(run: str) -> None:
    """Let the agent know that the server has ended a run, if that is the run of its point."""
    taken = Path(os.environ.get(FILE) or "none").with_suffix(".taken")
    with suppress(OSError, ValueError, KeyError):
        if json.loads(taken.read_text())["watch_id"] == run:
            taken.with_suffix(".ended").touch()


def was_ended(path: Path) -> bool:
    """Return whether the server has ended the run of a file's point."""
    return path.with_suffix(".ended").exists()
