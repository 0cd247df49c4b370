"""Relay of numbers from child processes, such as data-loader workers, to their parent's run.

A child appends lines of JSON to its file in the run's folder, `relay-<attempt>/<pid>.jsonl`. The
process that writes the run reads these files, and deletes them when it ends. For values that
cannot be relayed a child prints a line, the same line only once per run.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.clock import clock
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.nesting import flat
from halfstep.session.stderr import MOST_OF_A_KIND, in_a_line, kind_of, say
from halfstep.session.step_numbers import step_number
from halfstep.telemetry.attempt_files import AttemptFiles

#: Environment variable that names a run to spawned children: [folder, attempt, PID].
PARENT = "HALFSTEP_PARENT_RUN"
RECEIVE_SECONDS = 0.2  # between two polls of the files of child processes


class Relayed(NamedTuple):
    """Numbers of one `log` call of a child, by name."""

    numbers: dict[str, float]
    step: int | None  # None if the call had none


class RelayWriter:
    """Writer used in a child process and in its own children."""

    def __init__(self, files: AttemptFiles) -> None:
        self._files = AttemptFiles(files.folder.absolute(), files.attempt)
        self._folder = _folder(self._files)
        self._pid, self._descriptor = 0, -1

    def log(self, values: object, step: object) -> None:
        """Relay the numbers; print which values are not numbers. Does not raise."""
        try:
            self._log(values, step)
        except Exception as error:  # e.g. a full disk, an invalid step
            self.print_once(f"values of a child process are not logged: {error}")

    def print_once(self, text: str) -> None:
        """Print a line that no other child of the run has printed, and a few of each kind."""
        kind = f"said-{_digest(kind_of(text))}"
        with suppress(OSError):  # FileExistsError: another child printed it
            if self._is_open() and len([*self._folder.glob(f"{kind}-*")]) < MOST_OF_A_KIND:
                (self._folder / f"{kind}-{_digest(text)}").open("x").close()
                say(text)

    def _log(self, values: object, step: object) -> None:
        if not isinstance(values, Mapping):
            what = f"it received {in_a_line(values)}; allowed: a dictionary of values by name"
            self.print_once(f"log is ignored: {what}")
            return
        numbers = {}
        for name, value in flat(values, "/").items():
            try:
                if is_number(value):
                    value = value.detach() if hasattr(value, "detach") else value
                    numbers[str(name)] = float(as_scalar(value))
                    continue
                what = (
                    "from a child process only numbers are recorded; log other values in the parent"
                )
            except Exception as error:  # a value that only resembles a number
                what = f"{type(error).__name__}: {error}"
            self.print_once(f"{str(name)[:100]} is not logged: {what}")
        if numbers:
            self._append(Relayed(numbers, None if step is None else step_number(step)))

    def _append(self, relayed: Relayed) -> None:
        if not self._is_open():
            return
        if self._pid != os.getpid():  # first line, or an inherited descriptor
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._folder / f"{os.getpid()}.jsonl", flags, 0o666)
            self._pid = os.getpid()
        os.write(self._descriptor, f"{json.dumps(relayed)}\n".encode())

    def _is_open(self) -> bool:
        """Create the relay folder; return False if the run has ended or was deleted."""
        if self._files.outcome.exists() or not self._files.folder.exists():
            return False
        self._folder.mkdir(exist_ok=True)
        return True


class RelayReader:
    """Reader used in the process that writes the run."""

    def __init__(self, files: AttemptFiles) -> None:
        self._folder = _folder(files)
        self._offsets: dict[str, int] = {}
        self._read_at = clock()

    def is_due(self) -> bool:
        """Return whether the next poll is due."""
        return clock() - self._read_at > RECEIVE_SECONDS

    def receive(self) -> Iterator[Relayed]:
        """Yield the numbers that children have logged since the last call."""
        self._read_at = clock()
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                for line in file:
                    if not line.endswith(b"\n"):  # still being written
                        break
                    self._offsets[path.name] = self._offsets.get(path.name, 0) + len(line)
                    with suppress(ValueError, TypeError):  # damaged, e.g. by a full disk
                        yield _parse(json.loads(line))

    def close(self) -> None:
        """Delete the relay folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _parse(line: Any) -> Relayed:
    """Return the content of a line. Raises ValueError."""
    numbers, step = line if isinstance(line, list) else (None, None)
    is_whole = step is None or isinstance(step, int)
    if not is_whole or not isinstance(numbers, dict):
        raise ValueError(f"relay line is {line}; allowed: [numbers by name, step or null]")
    return Relayed({name: float(value) for name, value in numbers.items()}, step)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def announce(files: AttemptFiles) -> None:
    """Set the environment variable that names the run to spawned child processes."""
    os.environ[PARENT] = json.dumps([str(files.folder.absolute()), files.attempt, os.getpid()])


def retract() -> None:
    """Unset the environment variable of `announce`."""
    os.environ.pop(PARENT, None)


def find_announced() -> AttemptFiles | None:
    """Return the run of the multiprocessing parent of this process; None if it has none."""
    process = sys.modules.get("multiprocessing.process")
    parent = process.parent_process() if process else None
    with suppress(ValueError, TypeError):
        folder, attempt, pid = json.loads(os.environ.get(PARENT, ""))
        if parent is not None and parent.pid == pid:
            return AttemptFiles(Path(folder), attempt)
    return None


def _folder(files: AttemptFiles) -> Path:
    return files.folder / f"relay-{files.attempt}"
